"""One rank of a conformance job: start the library as a user does, run the suite, record failed checks."""

import faulthandler
import os

from conformance.natives import start
from conformance.suite import CommunicatorSuite
from jobs import record

from hvdbridge.backends.registry import load

if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)
    backend = os.environ["HVDBRIDGE_BACKEND"]
    native = start(backend)
    suite = CommunicatorSuite(lambda: load(backend, "communicator").world(timeout_seconds=60), native)
    record(suite.rank, {"size": suite.size, "wrong": suite.run()})
    native.stop()
