"""Telling systemd how the daemon is: the sd_notify protocol in a few lines."""

import os
import socket


class Notifier:
    """Sends states to $NOTIFY_SOCKET; without one it does nothing.

    The variable is taken out of the environment, so that programs the daemon
    starts do not speak in its name.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, **states: str | int) -> None:
        if not self._address:
            return
        text = "\n".join(f"{key}={value}" for key, value in states.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(5)
                out.sendto(os.fsencode(text), self._address)
        except OSError:
            pass  # the supervisor went away; the mount does not depend on it

    def ready(self, status: str) -> None:
        self.send(READY=1, STATUS=status, MAINPID=os.getpid())

    def stopping(self) -> None:
        self.send(STOPPING=1, STATUS="unmounting")
