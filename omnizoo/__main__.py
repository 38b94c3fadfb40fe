"""`python -m omnizoo ...` is `omnizoo ...`, also under torchrun: `torchrun ... -m omnizoo train my.yaml`."""

import sys

from omnizoo.cli.main import main

if __name__ == "__main__":  # ranks of `omnizoo verify` import this module
    sys.exit(main())
