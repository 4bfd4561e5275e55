"""Sends what may harm a real server, and looks whether it did."""

import json
from collections.abc import Callable

import httpx
from patience import promptly
from serve_house import Serve

LIMIT_S = 2.0
JSON = {"content-type": "application/json"}


class Ward:
    """One server under attack. `canary` is a plain request's answer, which must stay as it is."""

    def __init__(self, server: Serve, http: httpx.Client, canary: Callable[[], str]) -> None:
        self._server = server
        self._http = http
        self._canary = canary
        self.engines = self._engines()
        self.healthy = canary()

    def send(self, route: str, body: bytes, *statuses: int) -> httpx.Response:
        """The answer, which must be one of these, and soon; then the canary's."""
        answer = promptly(lambda: self._http.post(route, content=body, headers=JSON), LIMIT_S)
        assert answer.status_code in statuses, (body[:200], answer.text[:500])
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["message"]
            assert len(answer.content) < 4096
        self.check()
        return answer

    def refuse(self, route: str, body: dict[str, object]) -> httpx.Response:
        return self.send(route, json.dumps(body).encode(), 400, 413)

    def check(self) -> None:
        assert self._canary() == self.healthy
        assert self._engines() == self.engines

    def _engines(self) -> list[tuple[int, float]]:
        """Without their own children: a trial of a constraint may end one, that is its purpose."""
        found = self._server.children("worker")
        pids = {each.pid for each in found}
        return sorted((each.pid, each.create_time()) for each in found if each.ppid() not in pids)
