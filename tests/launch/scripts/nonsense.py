"""A job starts while its servers are bombarded."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from jobs import record

import hvdbridge as hb
from hvdbridge.backends import starting
from hvdbridge.backends.horovod import starter
from hvdbridge.policy.collectives import AllReduce

ATTACK = str(Path(__file__).with_name("attack.py"))
attackers: list[subprocess.Popen[bytes]] = []


def bombard(host: str, *ports: int) -> None:
    words = [sys.executable, "-S", ATTACK, host, *map(str, ports)]
    attackers.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))


def meet_under_fire(*arguments: object) -> object:
    meeting = meet(*arguments)
    if meeting.world.rank == 0:
        bombard(meeting.helper.host, meeting.helper.port, meeting.helper.pmi_port)
    return meeting


def serve_under_fire(host: str, *arguments: object) -> object:
    server = serve(host, *arguments)
    bombard(host, server.server_port)
    return server


def helper_megabytes() -> float:
    mine = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "hvdbridge.supervisor" in (process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("JOB_RECORDS") == os.environ["JOB_RECORDS"]
    ]
    return max(process.memory_info().rss for process in mine) / 2**20


meet, serve = starting.run_rendezvous, starter.serve
starting.run_rendezvous, starter.serve = meet_under_fire, serve_under_fire
began = time.monotonic()
hb.init()
seconds = time.monotonic() - began
total = hb.current().communicator.execute(AllReduce(torch.tensor([hb.rank() + 1.0]))).item()
said = [attacker.communicate(b"")[0].decode() for attacker in attackers]
hb.barrier()
record(hb.rank(), {"sum": total, "said": said, "megabytes": helper_megabytes(), "seconds": seconds})
hb.shutdown()
