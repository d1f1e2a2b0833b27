"""The command line.

entry     main, usage (the parser)
verbs     verbs, bench, plan, list, env
question  spec (names a model), arguments (--arg), model_args (its passes, and how to ask again),
          blame (whose fault is an error?)
output    terminal, native_stderr, native_stdout
"""
