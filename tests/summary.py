"""Adds up the JUnit files of one `make test`: what ran, what was skipped and why."""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def main(results: Path) -> int:
    total: Counter[str] = Counter()
    skipped: set[str] = set()
    for path in sorted(results.glob("*.xml")):
        counts: Counter[str] = Counter()
        for case in ElementTree.parse(path).iter("testcase"):
            reason = case.find("skipped")
            if reason is not None:
                outcome = "skipped"
                skipped.add(f"{path.stem}: {case.get('name')}: {reason.get('message', '')}")
            elif case.find("failure") is not None or case.find("error") is not None:
                outcome = "failed"
            else:
                outcome = "passed"
            counts[outcome] += 1
        print(f"{path.stem:32} {counts['passed']:5} passed {counts['failed']:5} failed")
        total += counts
    for name in ("times.txt", "skipped.txt"):
        if (results / name).exists():
            print((results / name).read_text().rstrip())
    for line in sorted(skipped):
        print(f"SKIPPED: {line}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
