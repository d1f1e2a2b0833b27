"""What ``optimize`` returns: graphs as generated code, run as long as their assumptions hold.

entry         module (``Compiled``, which the user gets), runner (one call of it)
running       codegen, signature, trees (nested arguments)
assumptions   surroundings (what a graph took from Python), named (what code can name), kept
              (how a value is compared), entries (of dicts)
falling back  rescue (which errors), undo (what a graph did before)
copies        copies (of the model), followed (its hooks), saved (graphs as data)
"""
