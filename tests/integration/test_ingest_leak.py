import pytest
from tests.ingest import running
async def test_x(database):
    async with running(database) as ingest:
        await ingest.create("ann")
        assert 0
