"""``python -m growth_service``: the same as ``growth``."""

from growth_service.cli.main import main

main()
