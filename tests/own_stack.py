"""A stack whose servers a test may kill, freeze and stop."""

import os
import shutil
import signal
from pathlib import Path

from deploy.local.process import Command
from deploy.local.stack import Stack

BROKER_SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    # Whoever comes may do all, but for what an entry forbids.
    "allow.everyone.if.no.acl.found": "true",
    # What is too old goes at once.
    "log.retention.check.interval.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}


class OwnStack(Stack):
    """A stack with a broker that can refuse somebody something."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self._ending: set[str] = set()

    def _prepare(self, name: str) -> Command:
        command = super()._prepare(name)
        if name == "kafka":
            with (command.folder / "server.properties").open("a") as properties:
                properties.writelines(f"{key}={value}\n" for key, value in BROKER_SETTINGS.items())
        return command

    def fault(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a server."""
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            self._ending.add(name)
        os.kill(self.pids[name], number)

    def restart(self, name: str) -> None:
        super().restart(name)
        self._ending.discard(name)

    def empty(self, name: str) -> None:
        """Kill a server and take its data: it starts again with nothing, Kafka as another cluster."""
        self._ending.add(name)
        self._children[name].kill()
        shutil.rmtree(self.state / name / "data")
        self.restart(name)

    def mend(self) -> None:
        """Thaw what is frozen, start what is dead or about to be."""
        for name in self.pids:
            if name in self._ending or not self.alive(name):
                self.restart(name)
            else:
                self.fault(name, signal.SIGCONT)
