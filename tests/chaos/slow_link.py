"""A slow link: `python slow_link.py PORT HOST HOST_PORT DELAY_S` passes on both ways, each piece
so much later than it came. In a process of its own, for the host that it is to run on."""

import asyncio
import contextlib
import sys


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """Pieces overlap on their way, as on a long line."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

    async def deliver() -> None:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(due - loop.time())
            writer.write(data)
            if not data:
                writer.close()
                return
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            await pieces.put((loop.time() + delay_s, data))
    await pieces.put((loop.time() + delay_s, b""))
    with contextlib.suppress(OSError):
        await delivering


async def main(port: int, host: str, host_port: int, delay_s: float) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, host_port)
        await asyncio.gather(_pass_on(reader, back, delay_s), _pass_on(there, writer, delay_s))

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
