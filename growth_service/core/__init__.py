"""The pure core: numbers in, numbers out. Knows numpy and nothing else.

No clock, no randomness without a seed, no file, no framework: everything here can be
called a million times by a test or by the simulator. Read in this order: ``score``,
``certificate``, ``decisions``, ``ledger``, ``budget``, ``records``.
"""
