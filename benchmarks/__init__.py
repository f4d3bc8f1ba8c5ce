"""aiosync measured beside other software and beside the machine's own limit, in one run and in turn.

``aiosync bench`` lists the cases, ``aiosync bench CASE --help`` a case's options. aiosync itself imports
nothing from here, except that its command ``bench`` runs :mod:`benchmarks.cli`.
"""
