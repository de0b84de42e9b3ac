"""What services say of themselves on their private ports."""

import aiohttp


async def metrics(private: str) -> dict[str, float]:
    """The metrics of a service at ``http://host:port``: name with labels → value."""
    async with aiohttp.ClientSession() as session, session.get(f"{private}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


async def readyz(private: str) -> int:
    """The status of its `readyz`; 0 while nobody answers."""
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{private}/readyz") as answer:
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return 0
