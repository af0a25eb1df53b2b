"""`python -m pyggml_dflash`: the command line, whatever else is called `dflash` on this machine."""

from dflash_cli.main import main

if __name__ == "__main__":
    main()
