import subprocess
import sys

from support.cluster import need

from jobs.control.channel import first_node_hosts, interface_of, own_addresses

_TWO_INTERFACES = """
ip link set lo up
ip link add eth0 type veth peer name far0
ip link add eth1 type veth peer name far1
for name in eth0 far0 eth1 far1; do ip link set $name up; done
ip address add 10.1.0.1/24 dev eth0
ip -6 address add fd77::1/64 dev eth0 nodad
ip -6 address add fd78::1/64 dev eth1 nodad
exec "$@"
"""
_ASK = """
from jobs.control.channel import interface_of, own_addresses
print(own_addresses(), own_addresses("eth1"), own_addresses("eth2"), interface_of("10.1.0.1"), interface_of("fd78::1"))
"""


def test_addresses_of_both_versions_by_interface() -> None:
    need("unshare", "ip")
    command = ["unshare", "--net", "sh", "-ec", _TWO_INTERFACES, "sh", sys.executable, "-c", _ASK]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['10.1.0.1', 'fd77::1', 'fd78::1'] ['fd78::1'] [] eth0 eth1"


def test_loopback_is_an_interface_but_reaches_no_node() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert not {"127.0.0.1", "::1"} & set(own_addresses())


def test_first_node_is_tried_by_its_name_unless_the_user_names_an_interface() -> None:
    addresses = ["10.1.0.1", "fd77::1"]
    assert first_node_hosts("gpu01", addresses) == ["gpu01", *addresses]
    assert first_node_hosts("gpu01", addresses, "ib0") == addresses
