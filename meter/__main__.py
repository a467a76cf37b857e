"""`python -m meter` is `weir`."""

from meter.cli import main

if __name__ == "__main__":
    main()
