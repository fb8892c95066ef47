"""A bad link in one process: what it does to packets, and two places to put it.

The core is `Direction`: a packet goes in, and the times at which its copies come out are returned.
`EmulatedTransport` does that to frames, `TcpProxy` to the bytes of TCP connections.
"""

from simulations.link.capacity import Capacity, Steady, Traced
from simulations.link.direction import Direction, Impairments
from simulations.link.proxy import TcpProxy, open_proxy
from simulations.link.traces import Opportunities, RateSteps, read_irish5g, read_mahimahi
from simulations.link.transport import EmulatedTransport

__all__ = [
    "Capacity",
    "Direction",
    "EmulatedTransport",
    "Impairments",
    "Opportunities",
    "RateSteps",
    "Steady",
    "TcpProxy",
    "Traced",
    "open_proxy",
    "read_irish5g",
    "read_mahimahi",
]
