"""What the tests of signed tokens share: an issuer, its keys, the server that shows them."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from patience import PATIENCE_S

ISS = "https://login.example.com/"
AUDIENCE = "forebay"


class Signer:
    """A private key by its id, and the JWK of its public half."""

    def __init__(self, kid: str, algorithm: str = "ES256", bits: int = 2048) -> None:
        self.kid = kid
        self.algorithm = algorithm
        if algorithm.startswith(("RS", "PS")):
            self.private: Any = rsa.generate_private_key(public_exponent=65537, key_size=bits)
            writer: Any = RSAAlgorithm
        elif algorithm == "EdDSA":
            self.private, writer = ed25519.Ed25519PrivateKey.generate(), OKPAlgorithm
        else:
            self.private, writer = ec.generate_private_key(ec.SECP256R1()), ECAlgorithm
        self.jwk = {**json.loads(writer.to_jwk(self.private.public_key())), "kid": kid}

    def token(self, *, head: dict[str, Any] | None = None, without: str = "", **claims: Any) -> str:
        """A token that is good but for what is said; `without` is a claim to leave out."""
        now = time.time()
        said = {
            "iss": ISS,
            "aud": AUDIENCE,
            "sub": "ann",
            "iat": now,
            "exp": now + 86_400,
            **claims,
        }
        said.pop(without, None)
        return jwt.encode(said, self.private, self.algorithm, {"kid": self.kid, **(head or {})})


class KeyServer:
    """A real HTTP server of a JWKS. Change `keys`, `status` or `body`; `asked` counts requests."""

    def __init__(self, *signers: Signer) -> None:
        self.keys = [signer.jwk for signer in signers]
        self.status = 200
        self.body: bytes | None = None
        self.headers: dict[str, str] = {}
        self.held = threading.Event()
        """Answers wait until it is set."""
        self.held.set()
        self.asked = 0
        house = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                house.asked += 1
                house.held.wait(PATIENCE_S)
                body = house.body
                if body is None:
                    body = json.dumps({"keys": house.keys}).encode()
                self.send_response(house.status)
                for name, value in house.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/keys"


@contextmanager
def key_server(*signers: Signer) -> Iterator[KeyServer]:
    house = KeyServer(*signers)
    thread = threading.Thread(target=house.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield house
    finally:
        house.held.set()
        house.server.shutdown()
        thread.join()
        house.server.server_close()
