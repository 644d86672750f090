"""A federation of your own over plain HTTP: ServerLink and ClientLink are all of fedfp8 that it needs.

python examples/own_system.py            # a server and three clients as processes; one of them is killed and comes back
"""

import sys
import tempfile
import urllib.request as web
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from subprocess import PIPE, Popen

import torch
from torch import nn

import fedfp8


def client(name: str, folder: str) -> None:
    """Serves one client: POST /train takes a message of the server and answers with its update."""
    link, model = fedfp8.ClientLink(store=folder), nn.Linear(64, 10)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(int(name)))
    y = x[:, :10].argmax(1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                model.load_state_dict(link.receive(self.rfile.read(int(self.headers["Content-Length"]))))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
                for _ in range(20):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                status, reply = 200, link.reply(model.state_dict())
            except fedfp8.LostReference as lost:
                status, reply = 409, str(lost).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def start(name: str, folder: str) -> tuple[Popen, str]:
    process = Popen([sys.executable, __file__, name, folder], stdout=PIPE, text=True)
    return process, f"http://127.0.0.1:{process.stdout.readline().strip()}/train"


def main() -> None:
    torch.manual_seed(0)
    server, state, names = fedfp8.ServerLink("dq", seed=1), nn.Linear(64, 10).state_dict(), ["1", "2", "3"]
    with tempfile.TemporaryDirectory() as folder:
        clients = {name: start(name, f"{folder}/{name}") for name in names}

        def exchange(item: tuple[str, bytes]) -> dict:
            name, message = item
            try:
                reply = web.urlopen(clients[name][1], message).read()
            except web.HTTPError:  # it lost the model it held: send the whole one
                reply = web.urlopen(clients[name][1], server.resend(name)).read()
            return server.receive(name, reply)

        for round in range(5):
            if round == 3:  # killed and started again: its folder still holds the last model
                clients["2"][0].kill()
                clients["2"] = start("2", f"{folder}/2")
            with ThreadPoolExecutor() as pool:
                state = fedfp8.average(pool.map(exchange, server.broadcast(state, names).items()))
            line = server.traffic[-1]
            print(f"round {round + 1}: {sum(line['down'].values())} bytes down, {sum(line['up'].values())} up")
        for process, _ in clients.values():
            process.kill()


if __name__ == "__main__":
    client(*sys.argv[1:]) if len(sys.argv) == 3 else main()
