#!/usr/bin/env python3
"""A switch in user space between network namespaces: every frame is late by a delay, and some are lost. For kernels without netem.

relay.py DELAY_MS LOSS_PERCENT NAMESPACE...    makes an interface `tap0` in each namespace, and prints `ready`
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

delay, loss = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 100
TUNSETIFF, TAP_WITHOUT_HEAD, NEW_NETWORK = 0x400454CA, 0x1002, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)
taps = []
for name in sys.argv[3:]:
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), NEW_NETWORK) != 0:
            sys.exit(f"{name}: {os.strerror(ctypes.get_errno())}")
    # A device belongs to the namespace in which it was made.
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"tap0", TAP_WITHOUT_HEAD))
    taps.append(tap)
print("ready", flush=True)

chance = random.Random(1)
behind = {}  # the port of each address
waiting, count = [], 0
while True:
    left = max(0, waiting[0][0] - time.monotonic()) if waiting else None
    for tap in select.select(taps, [], [], left)[0]:
        try:
            frame = os.read(tap, 65536)
        except OSError:
            continue  # not up yet
        to, by = frame[:6], frame[6:12]
        behind[by] = tap
        for other in [behind[to]] if to in behind else taps:
            if other != tap and chance.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, other, frame))
    while waiting and waiting[0][0] <= time.monotonic():
        _, _, tap, frame = heapq.heappop(waiting)
        try:
            os.write(tap, frame)
        except OSError:
            pass  # as a full queue loses it
