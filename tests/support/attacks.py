"""What somebody without the secret may send to a port of a run."""

import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

Attack = Callable[[socket.socket, random.Random], None]


def noise(attacker: socket.socket, chance: random.Random) -> None:
    attacker.sendall(chance.randbytes(chance.randrange(1, 5000)))


def half_a_challenge(attacker: socket.socket, chance: random.Random) -> None:
    attacker.sendall(chance.randbytes(chance.randrange(32)))


def wrong_proof(attacker: socket.socket, chance: random.Random) -> None:
    attacker.sendall(chance.randbytes(32))
    attacker.recv(64, socket.MSG_WAITALL)
    attacker.sendall(chance.randbytes(32))


def half_a_proof(attacker: socket.socket, chance: random.Random) -> None:
    attacker.sendall(chance.randbytes(32 + chance.randrange(32)))


def silence(_attacker: socket.socket, _chance: random.Random) -> None:
    pass


ATTACKS: tuple[Attack, ...] = (noise, half_a_challenge, wrong_proof, half_a_proof, silence)


def attack(port: int, seed: int, connections: int) -> None:
    """Open connections of all kinds, a hundred at a time."""
    chance = random.Random(seed)
    for _ in range(connections // 100):
        with ExitStack() as hundred:
            for _ in range(100):
                with suppress(OSError):  # the server has closed it already
                    attacker = hundred.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                    chance.choice(ATTACKS)(attacker, chance)
