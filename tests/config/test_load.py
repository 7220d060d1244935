import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_rl.config import load
from moe_rl.config.load import dump_config, find_config, load_config
from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.config.schema import OverlongConfig
from moe_rl.errors import ConfigError
from moe_rl.shipped import find
from tests.support.refusals import tells


def problems(file, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return caught.value.problems


def spoil(file, old, new):
    text = file.read_text()
    assert old in text, "the fixture has changed: nothing was spoilt"
    file.write_text(text.replace(old, new))


def test_a_valid_file_loads_with_its_values_and_defaults(config_file, tmp_path):
    config = load_config(config_file)
    assert config.train.optimizer.lr == 1e-6
    assert config.task.rewards["exact"].weight == 1.0
    assert config.model.path == tmp_path / "model"
    assert config.replay.mode == "r3"


def test_a_default_path_is_used(config_file, tmp_path):
    spoil(config_file, f"  runs_dir: {tmp_path}/runs\n", "")
    assert str(load_config(config_file).run.runs_dir) == "runs"


def test_relative_paths_stay_relative_to_the_working_directory(config_file):
    assert str(load_config(config_file, ["model.path=assets/m"]).model.path) == "assets/m"


def test_overrides_take_yaml_values_in_order(config_file):
    config = load_config(
        config_file,
        ["replay.mode=off", "run.steps=3", "run.steps=7", "train.optimizer.betas=[0.5, 0.75]",
         "task.rewards.exact.weight=2e-1", "objective.advantage=group_mean"],
    )  # fmt: skip
    assert config.replay.mode == "off"
    assert config.run.steps == 7
    assert config.train.optimizer.betas == (0.5, 0.75)
    assert config.task.rewards["exact"].weight == 0.2
    assert config.objective.advantage == "group_mean"


def test_every_problem_is_reported_at_once(config_file):
    spoil(config_file, "  steps: 6\n", "")
    spoil(config_file, "group_size: 2", "group_sise: 2")
    spoil(config_file, "microbatch_tokens: 40", "microbatch_tokens: '40'")
    found = problems(config_file, "run.seed=x", "objective.clip_low=-1", "nonsense")
    keys = ["run.steps", "rollout.group_size", "rollout.group_sise", "train.microbatch_tokens", "run.seed"]
    assert len(found) == 7
    assert {one.about.get("key") for one in found} == {*keys, "objective.clip_low", None}
    tells(found[0], override="'nonsense'")


def test_broken_rules_are_reported_with_broken_types(config_file):
    found = problems(config_file, "run.seed=x", "rollout.top_k=5", "task.pass_reward=nothing")
    assert [one.about["key"] for one in found] == ["run.seed", "task.pass_reward", "rollout.keep_sampling_mask"]


def test_unknown_key_names_line_and_suggestion(config_file):
    spoil(config_file, "group_size: 2", "group_sise: 2")
    line = 1 + config_file.read_text().split("\n").index("  group_sise: 2")
    unknown, missing = sorted(problems(config_file), key=lambda problem: problem.about["key"])
    tells(unknown, "rollout.group_size", key="rollout.group_sise", file=config_file, line=line)
    meaning = RolloutConfig.model_fields["group_size"].description
    tells(missing, meaning, key="rollout.group_size", file=config_file)


def test_a_section_that_may_be_absent_knows_its_keys(config_file):
    found = problems(config_file, "task.overlong.cache_tokns=1")
    missing, unknown = sorted(found, key=lambda problem: problem.about["key"])
    tells(unknown, "task.overlong.cache_tokens", key="task.overlong.cache_tokns")
    meaning = OverlongConfig.model_fields["cache_tokens"].description
    tells(missing, meaning, key="task.overlong.cache_tokens")
    assert load_config(config_file, ["task.overlong.cache_tokens=2"]).task.overlong.penalty == 1.0
    assert load_config(config_file).task.overlong is None


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.lr=1", "train.optimizer.lr"),
        ("objektive.name=grpo", "objective"),
        ("task.rewards.exact.wieght=1", "task.rewards.exact.weight"),
        ("eval.every=3", "eval.every_steps"),
        ("run.seed.x=1", None),
        ("zzzz=1", "run, model"),
    ],
)
def test_unknown_override_path_suggests(config_file, override, suggestion):
    (problem,) = problems(config_file, override)
    tells(problem, *([suggestion] if suggestion else []), override=repr(override))
    assert override.startswith(problem.about["key"])


REMOTE = "{kind: remote, url: 'http://host:1/score', arguments: [completion]"


@pytest.mark.parametrize(
    ("reward", "facts"),
    [
        ("{kind: nonsense}", {"key": "kind", "got": '"nonsense"', "expected": ("function", "remote")}),
        ("{kind: 3}", {"key": "kind", "got": "3", "expected": ("function",)}),
        ("{}", {"key": "function"}),
        ("{kind: function}", {"key": "function"}),
        ("{function: a.b, batch_size: 0}", {"key": "batch_size", "got": "0"}),
        ("{function: a.b, batch: true}", {"key": "batch", "given": "kind is function"}),
        ("{function: a.b, url: x}", {"key": "url", "given": "kind is function"}),
        ("{kind: exact, function: a.b}", {"key": "function", "given": "kind is exact"}),
        ("{kind: exact, answer_in: boxed}", {"key": "answer_in", "expected": ("box",)}),
        ("{kind: numeric, tolerance: -1}", {"key": "tolerance", "got": "-1"}),
        ("{kind: numeric, relative_tolerance: 1}", {"key": "relative_tolerance"}),
        ("{kind: math_verify, answer_in: box}", {"key": "answer_in", "given": "kind is math_verify"}),
        ("{kind: reasoning_gym, task: chain_sum}", {"key": "task", "given": "kind is reasoning_gym"}),
        ("{kind: remote, arguments: [completion]}", {"key": "url"}),
        ("{kind: remote, url: 'http://host:1/'}", {"key": "arguments"}),
        ("{kind: remote, url: 'http://host:1/', arguments: []}", {"key": "arguments", "got": "[]"}),
        ("{kind: remote, url: 'http://host:1/', arguments: [a, a]}", {"key": "arguments"}),
        ("{kind: remote, url: 'http://host:1/', arguments: ['a b']}", {"key": "arguments"}),
        ("{kind: remote, url: 'http://host:1/', arguments: [class]}", {"key": "arguments"}),
        ("{kind: remote, url: 'ftp://host:1/', arguments: [a]}", {"key": "url", "got": '"ftp://host:1/"'}),
        ("{kind: remote, url: 'http://', arguments: [a]}", {"key": "url"}),
        ("{kind: remote, url: 'http://me:secret@host:1/', arguments: [a]}", {"key": "url"}),
        ("{kind: remote, url: 'http://host:99999/', arguments: [a]}", {"key": "url"}),
        ("{kind: remote, url: 'http://host:1/a b', arguments: [a]}", {"key": "url"}),
        (REMOTE + ", timeout_seconds: 0}", {"key": "timeout_seconds"}),
        (REMOTE + ", attempts: 11}", {"key": "attempts"}),
        (REMOTE + ", concurrent_requests: 0}", {"key": "concurrent_requests"}),
    ],
)
def test_a_wrong_reward_is_told_by_its_key(config_file, reward, facts):
    (problem,) = problems(config_file, f"task.rewards.more={reward}")
    tells(problem, **facts | {"key": f"task.rewards.more.{facts['key']}"})


GENERATED = (
    "task.{}=[{{name: g, data: 'reasoning_gym:puzzle24', seed: {}, prompt: question, drop: [too_long], options: {}}}]"
)


def test_two_sources_of_a_generator_that_is_scored_have_the_same_options(config_file):
    scored = "task.rewards.gym={kind: reasoning_gym}"
    train, same = GENERATED.format("train", 1, "{max_value: 5}"), GENERATED.format("heldout", 2, "{max_value: 5}")
    config = load_config(config_file, [scored, train, same])
    assert config.task.generators == {"puzzle24": {"max_value": 5}}
    assert not [*config.task.problems()]
    other = [train, GENERATED.format("heldout", 2, "{max_value: 6}")]
    (problem,) = load_config(config_file, [scored, *other]).task.problems()
    tells(problem, key="task.train.0.options", got=("5",), expected=("6",))
    assert not [*load_config(config_file, other).task.problems()]


def test_only_an_environment_has_no_prompt_that_is_too_long(config_file):
    generated = [GENERATED.format(key, 1, "{}").replace("too_long", "") for key in ("train", "heldout")]
    for problem, key in zip(load_config(config_file, generated).task.problems(), ("train", "heldout"), strict=True):
        tells(problem, "too_long", key=f"task.{key}.0.drop", got="[]")
    plays = [*generated, "task.environment={run: a.b}", "task.rewards={}", "task.pass_reward=null"]
    assert not [*load_config(config_file, plays).task.problems()]


def test_rewards_are_read_back_from_the_resolved_config(config_file, tmp_path):
    config = load_config(
        config_file,
        [f"task.rewards.a={REMOTE}}}", "task.rewards.b={kind: numeric, weight: 0.5}", "task.rewards.c={kind: exact}"],
    )
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert [reward.kind for reward in config.task.rewards.values()] == ["function", "remote", "numeric", "exact"]


@pytest.mark.parametrize("key", ["run.steps", "train.optimizer.lr", "rollout.temperature"])
@pytest.mark.parametrize("value", ["true", "'1'", ".nan", ".inf", "-.inf", "-1", "0", "", "[1]", "{a: 1}", "no"])
def test_wrong_values_are_never_converted(config_file, key, value):
    (problem,) = problems(config_file, f"{key}={value}")
    tells(problem, key=key, override=repr(f"{key}={value}"))
    assert problem.got and problem.expected


def test_a_whole_float_is_no_count(config_file):
    (problem,) = problems(config_file, "run.steps=6.0")
    tells(problem, key="run.steps", got="6.0", expected=("integer",))


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", {"fault": "no mapping"}),
        (b"[1]", {"fault": "no mapping", "got": "[1]"}),
        (b"just text", {"fault": "no mapping", "got": '"just text"'}),
        (b"\xff\xfe", {"fault": "unreadable"}),
        (None, {"fault": "absent"}),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, facts):
    file = tmp_path / "x.yaml"
    if content is not None:
        file.write_bytes(content)
    (problem,) = problems(file)
    tells(problem, file=file, **facts)


@pytest.mark.parametrize("override", ["", "run.steps", "=3", "run..steps=1", " run.steps=1", "run.steps=[1"])
def test_malformed_overrides(config_file, override):
    (problem,) = problems(config_file, override)
    tells(problem, override=repr(override))


@pytest.mark.parametrize("value", ["9" * 4000, "-" + "9" * 4000, "1e999", "9e-999"])
def test_numbers_beyond_any_use(config_file, value):
    (problem,) = problems(config_file, f"train.optimizer.lr={value}")
    assert len(tells(problem, override=repr(f"train.optimizer.lr={value}"))) < 9000


def test_text_that_is_no_text(config_file):
    (problem,) = problems(config_file, r'run.name="\ud800"')
    tells(problem, override=repr(r'run.name="\ud800"'))


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_a_mangled_file_loads_or_is_refused_with_reasons(config_file, data):
    """Only ConfigError is allowed, because every command turns it into one message."""
    text = config_file.read_text()
    mangled = config_file.with_name("mangled.yaml")
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = min(len(text), start + data.draw(st.integers(0, 12)))
        text = (
            text[:start]
            + data.draw(st.text(max_size=4) | st.sampled_from(["\n", ": ", "- ", "{", "*", "!"]))
            + text[stop:]
        )
    mangled.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_config(mangled)
    except ConfigError as error:
        assert error.problems and all(error.problems)


def test_a_section_that_is_no_mapping(config_file):
    (problem,) = problems(config_file, "replay=r3")
    tells(problem, key="replay", got='"r3"')


@pytest.mark.parametrize("name", ["tiny", "1e6", "0x10", "off"])
def test_the_dump_loads_back_equal(config_file, tmp_path, name):
    config = load_config(config_file, [f"run.name='{name}'", "objective.kl_coef=1e-7"])
    dumped = tmp_path / "resolved.yaml"
    dumped.write_text(dump_config(config))
    assert load_config(dumped) == config
    # The dump holds every default, so loading it has checked each against its own field.
    assert yaml.safe_load(dumped.read_text())["checkpoint"]["keep"] == 2, "defaults are written out too"


def extending(file, text, name="own.yaml"):
    own = file.with_name(name)
    own.write_text(text)
    return own


def test_a_config_extends_another_key_by_key(config_file, tmp_path):
    spoil(config_file, "optimizer: {lr: 1e-6}", "optimizer: {lr: 1e-6, betas: [0.5, 0.6]}")
    first = extending(
        config_file, "extends: run.yaml\nrun: {steps: 9}\ntrain:\n  optimizer: {betas: [0.7, 0.8]}\n", "a.yaml"
    )
    (tmp_path / "deeper").mkdir()
    second = extending(
        first.parent / "deeper/x", "extends: ../a.yaml\nrun:\n  seed: 5\ncluster: {gpus: 2, gpu_memory_gib: 1}\n"
    )
    config = load_config(second, ["eval.prompts=4"])
    assert (config.run.name, config.run.steps, config.run.seed) == ("tiny", 9, 5)
    assert config.train.optimizer.lr == 1e-6 and config.train.optimizer.betas == (0.7, 0.8)
    assert config.cluster.gpus == 2 and config.eval.prompts == 4
    assert "extends:" not in dump_config(config)
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_problems_of_an_extending_config_name_the_file_that_says_it(config_file):
    spoil(config_file, "group_size: 2", "group_size: two")
    own = extending(config_file, "extends: run.yaml\nrun:\n  steps: many\ntrain: {lrr: 1}\n")
    found = {problem.about["key"]: problem for problem in problems(own)}
    line = 1 + config_file.read_text().split("\n").index("  group_size: two")
    tells(found["rollout.group_size"], file=config_file, line=line)
    tells(found["run.steps"], f"{own}:3", file=own, line=3)
    tells(found["train.lrr"], file=own, line=4)


def test_configs_that_extend_each_other_are_refused_with_the_chain(config_file, tmp_path):
    a = extending(config_file, "run: {seed: 1}\nextends: b.yaml\n", "a.yaml")
    b = extending(config_file, "run: {seed: 1}\nextends: a.yaml\n", "b.yaml")
    (problem,) = problems(a)
    tells(problem, key="extends", got=f"{a} -> {b} -> {a}", file=b, line=2)
    (problem,) = problems(extending(config_file, "extends: own.yaml\n"))
    own = config_file.with_name("own.yaml")
    tells(problem, key="extends", got=f"{own} -> {own}")


@pytest.mark.parametrize(
    ("said", "facts"),
    [
        ("nowhere.yaml", {"fault": "absent", "got": ("nowhere.yaml",)}),
        ("[run.yaml]", {"key": "extends", "got": '["run.yaml"]'}),
        ("null", {"key": "extends", "got": "null"}),
        ("qwen3_30b_a3c", {"fault": "absent", "do": ("qwen3_30b_a3b",)}),
        ("a" * 5000, {"fault": "unreadable"}),
    ],
)
def test_an_extends_that_names_no_config(config_file, said, facts):
    own = extending(config_file, f"run: {{seed: 1}}\nextends: {said}\n")
    (problem,) = problems(own)
    tells(problem, *facts.pop("do", ()), file=own, line=2, **facts)


def test_shipped_configs_are_found_by_name_unless_a_file_here_has_it(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = load.SHIPPED / "qwen3_30b_a3b.yaml"
    assert find_config("qwen3_30b_a3b") == find_config("qwen3_30b_a3b.yaml") == ours
    assert find_config("configs/qwen3_30b_a3b.yaml") == ours
    assert load_config(extending(config_file, "extends: qwen3_30b_a3b\n")) == load_config(ours)
    assert load_config(ours).model.published == load.SHIPPED / "models/qwen3_30b_a3b.json"
    (tmp_path / "qwen3_30b_a3b").mkdir()  # a folder is no config
    assert find_config("qwen3_30b_a3b") == ours
    config_file.rename("qwen3_30b_a3b.yaml")
    assert str(find_config("qwen3_30b_a3b.yaml")) == "qwen3_30b_a3b.yaml"
    (tmp_path / "configs/models").mkdir(parents=True)
    mine = tmp_path / "configs/models/qwen3_30b_a3b.json"
    mine.touch()
    assert str(find(mine.relative_to(tmp_path))) == "configs/models/qwen3_30b_a3b.json"
    assert load_config("tiny_moe_cpu").model.path == load.SHIPPED.parent / "assets/tiny_moe/policy"
    (problem,) = problems("qwen3_30b_a3x")
    tells(problem, "qwen3_30b_a3b", file="qwen3_30b_a3x", fault="absent")
    (problem,) = problems("nothing/like/it")
    tells(problem, "deepseek_v3", "moonlight_16b_a3b")
