"""A reward that never returns in one process of a job."""

import os
import time


def score(sample):
    while os.environ.get("JAX_PROCESS_ID") == os.environ["HANGS_IN"]:
        time.sleep(1)
    return -0.1 * len(sample.completion)
