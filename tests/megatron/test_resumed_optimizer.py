"""What an optimizer is given back when a run is resumed."""


def test_it_goes_on_counting_its_updates():
    """Adam's bias correction depends on their number: without it the next update is another one."""
    from moe_rl.megatron.checkpoint import _set_state

    class Optimizer:
        optimizer = None  # torch's, which is not in host memory here

        def state_dict(self):
            return {"optimizer": {"param_groups": [{"lr": 1.0}, {"lr": 2.0}], "state": {}}}

        def load_state_dict(self, state):
            self.loaded = state["optimizer"]

    optimizer = Optimizer()
    _set_state(optimizer, {"optimizer": {"state": {0: "moments"}}}, 7)
    assert optimizer.loaded["param_groups"] == [{"lr": 1.0, "step": 7}, {"lr": 2.0, "step": 7}]
    assert optimizer.loaded["state"] == {0: "moments"}
