"""The admin API, as the command line calls it. It knows no file and no table."""

import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from forebay_shared.embedded import data_path
from forebay_shared.settings import Secret, StartError

TIMEOUT_S = 60.0
DEFAULT_URL = "http://127.0.0.1:8000"

Tree = dict[str, Any]


class AdminClient:
    """Calls of one gateway's admin API. What it refuses is a StartError with its words."""

    def __init__(self, url: str, key: Secret) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise StartError("--url: an http:// or https:// URL is needed")
        self._key = key

    def call(
        self, method: str, path: str, body: object = None, query: Mapping[str, object] | None = None
    ) -> Tree:
        """The answer's JSON. Raises StartError for a refusal, or when nobody answers."""
        given = {name: str(value) for name, value in (query or {}).items() if value}
        url = f"{self._url}/admin/v1/{path}" + (
            "?" + urllib.parse.urlencode(given) if given else ""
        )
        data = None if method in ("GET", "DELETE") else _encoded(body or {})
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 - checked
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return msgspec.json.decode(answer.read(), type=Tree)
        except urllib.error.HTTPError as error:
            raise StartError(_said(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise StartError(f"no gateway answers at {self._url}: {reason}") from None

    def pages(self, path: str, query: Mapping[str, object] | None = None) -> Iterator[Tree]:
        """Every item of a list, page after page."""
        after = ""
        while True:
            page = self.call("GET", path, query={**(query or {}), "after": after, "limit": 1000})
            yield from cast("list[Tree]", page["data"])
            if not page.get("next") or page["next"] == after:
                return
            after = str(page["next"])


def find_key(given: str, data_dir: str, environment: Mapping[str, str] = os.environ) -> Secret:
    """The admin key: `given`, FOREBAY_ADMIN_KEY, or the one of this user's `forebay serve`."""
    if key := given or environment.get("FOREBAY_ADMIN_KEY", ""):
        return Secret(key)
    file = data_path(data_dir) / "admin-key"
    try:
        return Secret(file.read_text().strip())
    except OSError:
        raise StartError(
            f"no admin key: set FOREBAY_ADMIN_KEY (there is none in {file} either)"
        ) from None


def _encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except ValueError as error:  # half a surrogate pair, say
        raise StartError(f"what is to be sent cannot be written as JSON: {error}") from None


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(msgspec.json.decode(error.read())["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError, OSError):
        return f"the gateway answered {error.code}"
