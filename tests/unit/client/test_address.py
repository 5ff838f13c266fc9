"""What may be the address of a service."""

from __future__ import annotations

import pytest

from penstock import Client
from penstock.address import AddressError, check_address


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:7410", "localhost:1", "queue.example:65535", "[::1]:7410", "[fe80::1%eth0]:7410", "a_b-c:80",
        "dns:///queue:7410", "dns:queue", "unix:/run/q.sock", "unix-abstract:q", "ipv4:1.2.3.4:5,6.7.8.9:5",
        "ipv6:[::1]:7410", "xds:///queue",
    ],
)  # fmt: skip
def test_what_grpc_can_connect_to_is_taken(address: str) -> None:
    assert check_address(address, "queue") == address


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "is empty; must be HOST:PORT"),
        ("queue", "'queue' is not HOST:PORT"),
        (":7410", "':7410' is not HOST:PORT"),
        ("queue:", "'queue:' is not HOST:PORT"),
        ("queue:http", "'queue:http' is not HOST:PORT"),
        ("::1:7410", "'::1:7410' is not HOST:PORT, IPv6 in brackets"),
        ("[::1]", "'[::1]' is not HOST:PORT, IPv6 in brackets"),
        ("http://queue:7410", "'http://queue:7410' is not HOST:PORT"),
        ("queue:7410/", "'queue:7410/' is not HOST:PORT"),
        ("queue: 7410", "'queue: 7410' is not HOST:PORT"),
        ("queue:7410\n", "'queue:7410\\n' is not HOST:PORT"),
        ("unix:", "'unix:' is not HOST:PORT"),
        ("queue:0", "port 0 is out of range: 1 to 65535"),
        ("queue:65536", "port 65536 is out of range: 1 to 65535"),
    ],
)
def test_what_nothing_could_be_at_is_refused(address: str, said: str) -> None:
    with pytest.raises(AddressError) as error:
        check_address(address)
    assert str(error.value) == said


async def test_the_client_says_whose_address_is_wrong() -> None:
    with pytest.raises(ValueError, match="scheduler: 'nobody' is not HOST:PORT"):
        Client("127.0.0.1:1", "nobody")
