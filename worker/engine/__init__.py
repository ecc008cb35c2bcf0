"""Text in, label scores out. Torch lives only here, and Redis is not known.

    from worker.engine import Classifier

    classifier = Classifier.load("support")
    classifier.classify(["I was charged twice"])

Torch is imported when `Classifier` is first asked for, so that the pure modules beside it stay cheap to import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.engine.classifier import Classification, Classifier

__all__ = ["Classification", "Classifier"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from worker.engine import classifier

        return getattr(classifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
