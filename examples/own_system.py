"""A federation of your own over plain HTTP: ServerLink and ClientLink are all of fedfp8 that it needs.

python examples/own_system.py            # a server and three clients as processes; one of them is killed and comes back
"""

import multiprocessing
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
from torch import nn

import fedfp8


def client(number: int, folder: str, listener: socket.socket) -> None:
    link, model = fedfp8.ClientLink(store=folder), nn.Linear(64, 10)
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                model.load_state_dict(link.receive(self.rfile.read(int(self.headers["Content-Length"]))))
            except fedfp8.LostReference:
                return self.send_error(409)
            for _ in range(20):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
                optimizer.step()
            self.send_response_only(200)
            self.end_headers()
            self.wfile.write(link.reply(model.state_dict()))

    server = HTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
    server.socket = listener
    server.serve_forever()


def start(*arguments: object) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(target=client, args=arguments, daemon=True)
    process.start()
    return process


def main(folder: str) -> None:
    server, state = fedfp8.ServerLink("dq", seed=1), nn.Linear(64, 10).state_dict()
    clients = {k: (k, f"{folder}/{k}", socket.create_server(("127.0.0.1", 0))) for k in (1, 2, 3)}
    processes = {k: start(*clients[k]) for k in clients}

    def exchange(k: int, message: bytes) -> dict:
        url = f"http://127.0.0.1:{clients[k][2].getsockname()[1]}"
        try:
            return server.receive(k, urlopen(url, message).read())
        except HTTPError:  # it has lost the model that this message builds on
            return server.receive(k, urlopen(url, server.resend(k)).read())

    for round in range(1, 6):
        if round == 4:  # killed and started again: what it was sent last is in its folder
            processes[2].kill()
            processes[2] = start(*clients[2])
        messages = server.broadcast(state, list(clients))
        with ThreadPoolExecutor() as pool:
            state = fedfp8.average(pool.map(exchange, messages.keys(), messages.values()))
        down, up = (sum(server.traffic[-1][way].values()) for way in ("down", "up"))
        print(f"round {round}: {down} bytes down, {up} up")


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
