"""`python -m terrazzo`: the command line."""

from terrazzo.cli import main

if __name__ == "__main__":
    main()
