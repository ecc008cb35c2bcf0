"""Write `tickets.jsonl` anew: `python -m producer.samples`, after a change to the texts or the generator."""

from producer import samples

samples.path().write_text(samples.to_jsonl(samples.generate()), encoding="utf-8", newline="\n")
