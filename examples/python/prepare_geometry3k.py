"""Writes geometry3k (columns images, problem, answer) as the JSONL that the guide's command reads, and its pictures.

    python3 examples/python/prepare_geometry3k.py hiyouga/geometry3k --output data/geometry3k

makes data/geometry3k/train.jsonl, one row {"prompt": messages, "images": [paths], "label": answer} per problem, and
data/geometry3k/train/ with the pictures. The dataset is a hub name, a folder or a file with these columns. Then:

    --data.prompt_dataset data/geometry3k/train.jsonl --data.input_key prompt --data.label_key label
    --data.apply_chat_template --data.max_images_per_prompt 1

Training can also read the columns as they are: --data.input_key problem --data.label_key answer.
"""

import argparse
import json
import sys
from pathlib import Path

from openrlhf.launcher.data.chat import split_tags
from openrlhf.launcher.data.images import as_list, read_image
from openrlhf.launcher.data.locate import open_dataset
from openrlhf.rollout.images import decode_image

INSTRUCTION = "Reason step by step and put the final answer within \\boxed{}."


def row_of(problem, answer, paths):
    """One row: `<image>` tags become image parts; a problem without a tag gets its pictures in front."""
    text = f"{problem}\n{INSTRUCTION}"
    content = split_tags(text) if "<image>" in text else [{"type": "image"} for _ in paths] + split_text(text)
    return {"prompt": [{"role": "user", "content": content}], "images": paths, "label": answer}


def split_text(text):
    return [{"type": "text", "text": text}]


def write(rows, folder, split):
    """The JSONL file and the pictures of one split; returns the file and how many rows were left out."""
    pictures = folder / split
    pictures.mkdir(parents=True, exist_ok=True)
    file, left_out = folder / f"{split}.jsonl", 0
    with file.open("w", encoding="utf-8") as out:
        for number, row in enumerate(rows):
            images = as_list(row["images"])
            if row["problem"].count("<image>") not in (0, len(images)):
                left_out += 1
                print(f"{rows.where(number)}: {len(images)} images for {row['problem']!r}: left out", file=sys.stderr)
                continue
            paths = []
            for place, image in enumerate(images):
                path = pictures / f"{number}-{place}.png"
                decode_image(read_image(image)).save(path)
                paths.append(str(path.resolve()))
            out.write(json.dumps(row_of(row["problem"], row["answer"], paths), ensure_ascii=False) + "\n")
    return file, left_out


def main(argv=None):
    parser = argparse.ArgumentParser(description="geometry3k as JSONL and pictures")
    parser.add_argument("dataset", help="hub name, folder or file with the columns images, problem and answer")
    parser.add_argument("--output", type=Path, default=Path("data/geometry3k"))
    parser.add_argument("--splits", nargs="+", default=["train"])
    args = parser.parse_args(argv)
    for split in args.splits:
        rows = open_dataset(args.dataset, split=split, flag="dataset")
        missing = {"images", "problem", "answer"} - set(rows.columns)
        if missing:
            parser.error(f"{args.dataset} has no column {', '.join(sorted(missing))}; it has {', '.join(rows.columns)}")
        file, left_out = write(rows, args.output, split)
        print(f"{file}: {len(rows) - left_out} rows")


if __name__ == "__main__":
    main()
