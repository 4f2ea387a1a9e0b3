"""`python -m tf_smb.bench`: the same as `tf-smb bench`."""

import sys

from tf_smb.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
