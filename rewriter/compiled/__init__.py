"""What ``optimize`` returns: graphs as generated code, run as long as their assumptions hold.

entry         module (``Compiled``, which the user gets), gives_way (to the user's own names),
              runner (one call of it), forms (which graphs a call runs)
running       codegen, stacks (results that stay together), signature, trees (nested arguments),
              array_inputs (of numpy), wide_inputs (whose dtype the model does not hold),
              unread (what of the arguments does not matter)
assumptions   assumptions (all that is asked at each call), external_state (what a graph took from
              Python), baked_values (how that is found), instructions (of code), code_names (what
              it names), homes (and whose names those are), visible_names (what it can see),
              value_checks (how a value is compared), object_contents (by name), snapshots (what
              need not be compared again), entries (of dicts), known_calls (of which nothing need be
              asked again)
falling back  fallback (which errors), undo (what a graph did before), plain_calls (what is said)
copies        copies (of the model), linked_hooks (its hooks), graph_pickle (graphs as data)
"""
