"""ROLL's CheckpointManager, which makes an uploader and forgets its errors."""

import os
import shutil

from roll.utils.upload_utils import uploader_registry

swallowed: list[Exception] = []  # the stand-in's own: ROLL prints them


def get_latest_ckpt(checkpoint_config):
    return uploader_registry[checkpoint_config["type"]](**checkpoint_config).get_latest_ckpt()


def download_model(model_name_or_path, local_dir=None):
    assert os.path.isdir(model_name_or_path)
    return model_name_or_path


class CheckpointManager:
    def __init__(self, checkpoint_config=None):
        options = dict(checkpoint_config)
        self.uploader = uploader_registry[options.pop("type", "file_system")](**options)

    def upload(self, ckpt_id, local_state_path, keep_local_file=False):
        try:
            self.uploader.upload(ckpt_id=ckpt_id, local_state_path=local_state_path)
            if not keep_local_file:
                shutil.rmtree(local_state_path, ignore_errors=True)
        except Exception as error:
            swallowed.append(error)
