"""Runs Dynamo's RadixTree for test_dynamo.py, in an environment of its own: a line of JSON in, a line of JSON out.

{"engine": 0, "stored": [[hash, tokens], …], "parent": hash}, {"engine": 0, "removed": [hash, …]} and
{"engine": 0, "cleared": true} note what an engine has cached; {"find": tokens} returns the blocks that each engine has.
"""

import json
import sys
from itertools import count

from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]


def main(block_size: int) -> None:
    tree, numbers = RadixTree(), count(1)
    for line in sys.stdin:
        asked = json.loads(line)
        if "find" in asked:
            scores = tree.find_matches(compute_block_hash_for_seq(asked["find"], block_size)).scores
            found = {(key[0] if isinstance(key, tuple) else key): score for key, score in scores.items()}
        else:
            found = {}
            event = {"event_id": next(numbers), "data": data_of(asked, block_size), "dp_rank": 0}
            tree.apply_event(asked["engine"], json.dumps(event).encode())
        print(json.dumps(found), flush=True)


def data_of(asked: dict, block_size: int) -> object:  # type: ignore[type-arg]
    if "stored" in asked:
        blocks = [
            {"block_hash": hash, "tokens_hash": compute_block_hash_for_seq(tokens, block_size)[0]}
            for hash, tokens in asked["stored"]
        ]
        return {"stored": {"parent_hash": asked["parent"], "blocks": blocks}}
    return {"removed": {"block_hashes": asked["removed"]}} if "removed" in asked else "cleared"


main(int(sys.argv[1]))
