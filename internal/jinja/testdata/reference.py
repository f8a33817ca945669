#!/usr/bin/env python3
"""Renders conversations with Jinja as transformers does (chat_template_utils.py), and
masks their answers by TRL's documented rules. Prints a JSON object a line.

    reference.py render SEED COUNT    # for testdata/golden.jsonl: 1 6
    reference.py masks SEED COUNT     # for data/testdata/masks.jsonl: 1 3
    reference.py packs SEED COUNT     # for data/testdata/packs.jsonl: 1 6
"""
import json
import os
import random
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = sorted(f[: -len(".jinja")] for f in os.listdir(HERE + "/templates"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Tracker(Extension):
    """{% generation %} as in transformers."""

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        environment.extend(tracker=self)
        self.blocks, self.spans = None, None

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_support"), [], [], body).set_lineno(lineno)

    def _support(self, caller):
        text = caller()
        start = len("".join(self.blocks))
        self.spans.append((start, start + len(text)))
        return text


class Raised(Exception):
    pass


def raise_exception(message):
    raise Raised(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(name):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Tracker, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    with open(f"{HERE}/templates/{name}.jinja", newline="") as f:
        return env.from_string(f.read())


def render(template, messages, prompt=False):
    tracker = template.environment.tracker
    tracker.blocks, tracker.spans = [], []
    for block in template.generate(messages=messages, add_generation_prompt=prompt, tools=None, **SPECIAL):
        tracker.blocks.append(block)
    return "".join(tracker.blocks), tracker.spans


WORDS = ["river", "stone", "Ä ö", "naïve", "日本語", "🎉", "a b", "</think>", "<think>", "{{ x }}", "{% y %}", "'quoted'", '"double"', "\\n", "tab\there", "line\nbreak", "  ", "0", "12345", "<s>", "it's", "&amp;", "…", "END."]


def text(rng, least=0):
    return rng.choice(["", "", " ", "\n"]) + " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, 12))) + rng.choice(["", "", " \n", "?"])


def conversations(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        messages = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": text(rng, 1)})
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            user = {"role": "user", "content": text(rng, 1)}
            if rng.random() < 0.2:
                user["when"] = rng.choice([None, True, 3, 2.5, 1e-7, [1, "é\n"], {"z": 1, "a": {"q": []}}])
            messages += [user, {"role": "assistant", "content": text(rng)}]
        if rng.random() < 0.1:
            messages.pop()
        yield messages


def attempt(template, messages, prompt=False):
    try:
        return render(template, messages, prompt)
    except Raised as e:
        return str(e), None


def renderings(seed, count):
    for name in NAMES:
        template = compile_template(name)
        for messages in conversations(seed, count):
            for prompt in (False, True):
                out, spans = attempt(template, messages, prompt)
                row = {"template": name, "messages": messages, "prompt": prompt}
                if spans is None:
                    row["raises"] = out
                else:
                    row["text"] = out
                    if spans:
                        row["answers"] = [out[a:b] for a, b in spans]
                yield row


SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<think>"]


def tokenize(text):
    """Special tokens, 256 and on, and else bytes; and the characters of each token."""
    tokens, chars, i = [], [], 0
    while i < len(text):
        for k, special in enumerate(SPECIALS):
            if text.startswith(special, i):
                tokens.append(256 + k)
                chars.append((i, i + len(special)))
                i += len(special)
                break
        else:
            for byte in text[i].encode():
                tokens.append(byte)
                chars.append((i, i + 1))
            i += 1
    return tokens, chars


def mask(template, name, messages):
    """assistant_only_loss: the tokens of {% generation %} blocks. Without these,
    prompt and completion: what the rendering up to an answer has more than its prompt."""
    text, spans = render(template, messages)
    if "{% generation %}" not in open(f"{HERE}/templates/{name}.jinja").read() and "{%- generation -%}" not in open(f"{HERE}/templates/{name}.jinja").read():
        spans = []
        for i, m in enumerate(messages):
            if m["role"] != "assistant":
                continue
            prompt, _ = render(template, messages[:i], True)
            through, _ = render(template, messages[: i + 1])
            if not text.startswith(through) or not through.startswith(prompt):
                return text, None
            spans.append((len(prompt), len(through)))
    return text, spans


def masks(seed, count, names=NAMES):
    for name in names:
        template = compile_template(name)
        for messages in conversations(seed, count):
            row = {"template": name, "messages": messages}
            try:
                text, spans = mask(template, name, messages)
            except Raised as e:
                row["raises"] = str(e)
                yield row
                continue
            if not any(m["role"] == "assistant" for m in messages):
                continue
            if spans is not None:
                row["tokens"], chars = tokenize(text)
                row["mask"] = "".join("01"[any(a < e and s < b for s, e in spans)] for a, b in chars)
            yield row


def packs(seed, count, seq=600):
    """packing_strategy="bfd": sequences are cut to seq, sorted by length, longest first,
    and each goes into the bin with the least room that is enough, of these the one that
    has waited longest. position_ids begin anew with each sequence, whose first label is
    ignored. Labels are shifted by one, as the model's loss does."""
    for name in NAMES:
        template, messages, documents = compile_template(name), [], []
        for row in masks_of(name, template, seed, count):
            messages.append(row["messages"])
            tokens, counted = row["tokens"][:seq], row["mask"][:seq]
            if "1" in counted[1:]:
                documents.append((tokens, counted))
        bins, order = [], sorted(range(len(documents)), key=lambda i: -len(documents[i][0]))
        waiting = []  # bins with room, by when they got it
        for i in order:
            n = len(documents[i][0])
            room = min((seq - b["length"] for b in waiting if seq - b["length"] >= n), default=None)
            if room is None:
                b = {"documents": [], "length": 0}
                bins.append(b)
            else:
                b = next(b for b in waiting if seq - b["length"] == room)
                waiting = [o for o in waiting if o is not b]
            b["documents"].append(i)
            b["length"] += n
            if b["length"] < seq:
                waiting.append(b)
        rows = []
        for b in bins:
            tokens, positions, labels = [], [], []
            for i in b["documents"]:
                ids, counted = documents[i]
                tokens += ids
                positions += list(range(len(ids)))
                labels += [t if c == "1" and k > 0 else -1 for k, (t, c) in enumerate(zip(ids, counted))]
            rows.append({"tokens": tokens, "positions": positions, "targets": labels[1:] + [-1]})
        yield {"template": name, "seq": seq, "messages": messages, "rows": rows}


def masks_of(name, template, seed, count):
    for row in masks(seed, count, [name]):
        if "mask" in row:
            yield row


if __name__ == "__main__":
    mode, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rows = {"render": renderings, "masks": masks, "packs": packs}[mode](seed, count)
    for row in rows:
        print(json.dumps(row, ensure_ascii=False, separators=(",", ":")))
