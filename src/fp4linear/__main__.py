"""`python -m fp4linear` is the command `fp4linear`."""

from fp4linear.cli import main

if __name__ == "__main__":
    main()
