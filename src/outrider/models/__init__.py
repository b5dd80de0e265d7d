"""One forward pass over a flat batch; Transformers is imported here first, without what torchao says meanwhile."""

import importlib.util
import logging

if importlib.util.find_spec("torchao") is not None:
    # Transformers imports it, and it warns of every GPU library that is not on this machine.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import transformers.quantizers.auto  # noqa: F401
    finally:
        logging.disable(before)
