"""The command line; `foresample.__main__` starts it.

    app         the commands by their names: parses, checks, and only then imports what does the work
    options     what each command takes, and what of it is wrong whatever the machine; no torch here
    sample, generate, inspect, tune, check, policy_server, doctor, demo    a module a command: `run(options)`
    targets     the target those options ask for, and its window
    console     what commands say: refusals, tables, bars
    pictures    what commands paint
    interrupts  Ctrl-C

Exit status: 1 the answer is no (the distribution test failed, a dataset is not complete), 2 wrong input or an error, 3
samples broke, 130 interrupted, 141 nobody reads the output any more.
"""
