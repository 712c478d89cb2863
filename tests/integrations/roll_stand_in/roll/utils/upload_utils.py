"""ROLL's registry, and its own uploader."""

import os
import re
import shutil
from typing import Any

uploader_registry: dict[str, Any] = {}


class FileSystemUploader:
    def __init__(self, output_dir, *args, **kwargs):
        self.output_dir = output_dir

    def upload(self, ckpt_id: str, local_state_path: str, **kwargs):
        shutil.copytree(local_state_path, os.path.join(self.output_dir, ckpt_id), dirs_exist_ok=True)

    def get_latest_ckpt(self):
        found = [name for name in os.listdir(self.output_dir) if re.fullmatch(r"checkpoint-(\d+)", name)]
        if not found:
            return None
        return os.path.join(self.output_dir, max(found, key=lambda name: int(name.rpartition("-")[2])))


uploader_registry["file_system"] = FileSystemUploader
