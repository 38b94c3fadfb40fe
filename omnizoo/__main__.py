"""`python -m omnizoo ...` is `omnizoo ...`, also under torchrun: `torchrun ... -m omnizoo train my.yaml`."""

import sys

from omnizoo.cli.main import main

sys.exit(main())
