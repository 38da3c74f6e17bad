"""LeRobot's real asynchronous server and client on the loopback, the policy accelerated."""

from __future__ import annotations

import threading
from concurrent import futures
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import lerobots
from tests.support.waiting import wait_for


def arm(robots: Any) -> tuple[type, list[dict[str, float]]]:
    """A robot of LeRobot's interface with four joints; what it was told to do."""
    done: list[dict[str, float]] = []
    joints = {f"joint_{i}.pos": float for i in range(4)}

    class Arm(robots.Robot):
        config_class, name = robots.RobotConfig, "arm"
        observation_features = action_features = joints
        is_connected = is_calibrated = True

        def connect(self, calibrate: bool = True) -> None: ...
        def calibrate(self) -> None: ...
        def configure(self) -> None: ...
        def disconnect(self) -> None: ...

        def get_observation(self) -> dict[str, float]:
            return {name: 0.01 * len(done) for name in joints}

        def send_action(self, action: dict[str, float]) -> dict[str, float]:
            done.append(action)
            return action

    return Arm, done


@pytest.mark.slow
def test_plans_are_streamed_to_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = import_module("grpc")

    from foresample.integrations.policies.server import accelerated_server

    monkeypatch.chdir(tmp_path)  # LeRobot writes logs where it is started
    place = lerobots.folder(lerobots.policy(), tmp_path / "policy")
    with lerobots.importing():
        import lerobot.utils.utils

        # Importing the server would set up logging for this whole process, into files that stay open.
        monkeypatch.setattr(lerobot.utils.utils, "init_logging", lambda **options: None)
        from lerobot import robots
        from lerobot.async_inference import policy_server, robot_client
        from lerobot.async_inference.configs import PolicyServerConfig, RobotClientConfig
        from lerobot.transport import services_pb2_grpc

        plain = policy_server.raw_observation_to_observation

        def with_scene(*args: Any) -> dict[str, torch.Tensor]:
            """A server sends states and pictures on; what encodes pictures is not installed here."""
            return plain(*args) | {"observation.environment_state": torch.zeros(1, 22)}

        kind, done = arm(robots)
        monkeypatch.setattr(policy_server, "raw_observation_to_observation", with_scene)
        monkeypatch.setattr(robot_client, "make_robot_from_config", kind)
        served = accelerated_server(policy_server.PolicyServer, window=8, warm=True)(PolicyServerConfig())
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        services_pb2_grpc.add_AsyncInferenceServicer_to_server(served, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        config = robots.RobotConfig(id="arm", calibration_dir=tmp_path)
        client = robot_client.RobotClient(
            RobotClientConfig(
                policy_type="diffusion",
                pretrained_name_or_path=str(place),
                robot=config,
                actions_per_chunk=8,
                server_address=f"127.0.0.1:{port}",
            )
        )
        try:
            assert client.start()
            threads = [
                threading.Thread(target=client.receive_actions, daemon=True),
                threading.Thread(target=client.control_loop, args=("",), daemon=True),
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: len(done) >= 20, "more than two plans")
        finally:
            client.stop()
            for thread in threads:
                thread.join()
            server.stop(None).wait()
    report = served.policy.foresample_report
    assert report.steps == 20
    assert report.calls_mean < 0.6 * 20
    values = torch.tensor([list(action.values()) for action in done])
    assert values.isfinite().all()
    assert len(values.unique(dim=0)) > 8  # not one plan again and again
