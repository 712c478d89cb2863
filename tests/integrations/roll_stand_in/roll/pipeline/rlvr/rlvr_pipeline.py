"""ROLL's RLVR pipeline: what it does at each step is the test's."""

from roll.pipeline.base_pipeline import BasePipeline


class RLVRPipeline(BasePipeline):
    def __init__(self, pipeline_config):
        super().__init__(pipeline_config)
        clusters = [make() for make in pipeline_config.clusters]
        for cluster in clusters:
            cluster.initialize(pipeline_config)
        self.set_checkpoint_clusters(*clusters)

    def run(self):
        for global_step in range(self.pipeline_config.max_steps):
            if global_step <= self.state.step:
                continue
            metrics = self.pipeline_config.train(self, global_step)
            self.state.step = global_step
            self.state.log_history.append(metrics)
            self.do_checkpoint(global_step=global_step)
