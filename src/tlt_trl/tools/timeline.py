"""`tlt-trl timeline`: what every rank did when, in seconds by kind and as a picture."""

import argparse
import json
import sys

from ..telemetry.timeline import draw_timelines, read_timelines, seconds_by_name


def run(args: argparse.Namespace) -> int:
    """Prints a line of JSON per rank, and draws where an output is named; returns 1 where there is nothing to read."""
    try:
        timelines = read_timelines(args.folder)
        if args.output is not None:
            draw_timelines(timelines, args.output, args.first_s, args.last_s)
    except (FileNotFoundError, RuntimeError) as error:
        print(f"tlt-trl timeline: {error}", file=sys.stderr)
        return 1
    for timeline in timelines:
        seconds = {name: round(value, 3) for name, value in seconds_by_name(timeline).items()}
        print(json.dumps({"rank": timeline.rank, "zero_error_s": timeline.zero_error_s, "seconds": seconds}))
    return 0
