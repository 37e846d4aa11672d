"""`lockstep run -H` over ssh itself: the default remote shell, and OpenSSH's server on two network namespaces."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest
from support import HANG, MARK, wait_for_end

pytestmark = pytest.mark.long

PASSWD = "root:x:0:0::{home}:/bin/sh\nsshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
SHADOW = "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n"
SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
SetEnv {mark}
"""
CLIENT = "Host *\nIdentityFile {folder}/key\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
STAY = "echo rank $RANK of $WORLD_SIZE on $(hostname); exec sleep 1000"


class SshHosts:
    """Hosts of which each lets root of the others in, as `ssh HOST` without a question."""

    def __init__(self, programs, net, sshd):
        self.programs, self.net, self.sshd = programs, net, sshd
        self.folder = programs.folder / "ssh"
        (self.folder / ".ssh").mkdir(parents=True)
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        (self.folder / "passwd").write_text(PASSWD.format(home=self.folder))
        (self.folder / "shadow").write_text(SHADOW)
        mark = f"{MARK}={programs.environment()[MARK]}"
        (self.folder / "sshd_config").write_text(SERVER.format(folder=self.folder, mark=mark))
        (self.folder / ".ssh" / "config").write_text(CLIENT.format(folder=self.folder))
        mounts = f"mount --bind {self.folder}/passwd /etc/passwd && mount --bind {self.folder}/shadow /etc/shadow"
        for host in range(len(net.names)):
            net.run(host, "sh", "-c", f"{mounts} && mount -t tmpfs none /run && mkdir -m 755 /run/sshd")

    def start_server(self, host):
        """Returns once it listens. Without the mark of the test, so that it counts as none of its programs."""
        command = self.net.inside(host, self.sshd, "-D", "-e", "-f", self.folder / "sshd_config")
        self.server = self.programs.start(*command, **{MARK: "none"})
        self.server.wait_for("Server listening on 0.0.0.0", "stderr")

    def start(self, hosts, *words, **variables):
        """On the first host."""
        lockstep = self.programs.find("lockstep")
        return self.programs.start(*self.net.inside(0, lockstep, "run", "-H", hosts, *words), **variables)

    def processes(self, *names):
        """Pids on the hosts, by program."""
        found = []
        for pid in self.net.processes():
            try:
                if pathlib.Path(f"/proc/{pid}/comm").read_text().rstrip("\n") in names:
                    found.append(pid)
            except OSError:  # ended meanwhile
                pass
        return found


@pytest.fixture
def hosts(programs, make_hosts):
    # sshd starts itself again for each connection, and wants to know its path for that.
    sshd = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]))
    if not sshd or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        pytest.skip("hosts to reach by ssh need sshd and ssh (Debian: openssh-server, openssh-client)")
    programs.run("lockstep", "run", "--dry-run", "-H", "a,b", "true").skip_without_openssl()
    made = SshHosts(programs, make_hosts(2), os.path.abspath(sshd))
    made.start_server(1)
    yield made
    made.server.kill()


def test_ranks_of_two_hosts_sum_up(programs, hosts):
    done = hosts.start("host-a:2,host-b:1", programs.find("all_reduce")).finish()
    done.skip_without_ucx()
    assert done.status == 0, done.text
    sums = sorted(line for line in done.stdout.splitlines() if "now has" in line)
    assert sums == [f"[rank {rank}] rank {rank} now has [3, 3]" for rank in range(3)], done.text
    programs.wait_until_gone()


def test_words_and_variables_come_as_they_are(programs, hosts):
    word = "a 'b' \"c\" $HOME \\ *;"
    options = ["--no-prefix", "-x", "GIVEN", "--rdzv-id", "the job"]
    script = 'printf "%s|%s|%s|%s|%s\\n" "$(hostname)" "$PWD" "$GIVEN" "$1" "$TORCHELASTIC_RUN_ID"'
    done = hosts.start("host-a,host-b", *options, "sh", "-c", script, "sh", word, GIVEN=word).finish()
    assert done.status == 0, done.text
    expected = [f"{host}|{programs.folder}|{word}|{word}|the job" for host in ("host-a", "host-b")]
    assert sorted(done.stdout.splitlines()) == expected, done.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_end_all_hosts(programs, hosts, number):
    job = hosts.start("host-a,host-b", "sh", "-c", STAY)
    job.wait_for("rank 0 of 2 on host-a"), job.wait_for("rank 1 of 2 on host-b")
    job.kill(number)
    assert job.finish().status == (-9 if number == signal.SIGKILL else 128 + number)
    programs.wait_until_gone()


# From OpenSSH 9.8 on a connection's processes have names of their own.
@pytest.mark.parametrize("lost", [["ssh"], ["sshd", "sshd-session", "sshd-auth"]], ids=lambda names: names[0])
def test_the_loss_of_a_connection_ends_all_hosts(programs, hosts, lost):
    job = hosts.start("host-a,host-b", "sh", "-c", STAY)
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    connections = set(hosts.processes(*lost)) - {hosts.server.pid}
    assert connections
    for pid in connections:
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(pid, time.monotonic() + HANG)
    done = job.finish()
    assert done.status == 1, done.text
    assert "host-b can't be reached, its remote shell was lost, or its agent was killed" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_host_without_a_server_is_named_with_the_words_of_ssh(programs, hosts):
    hosts.server.kill()
    assert wait_for_end(hosts.server.pid, time.monotonic() + HANG)
    done = hosts.start("host-a,host-b", "sh", "-c", STAY).finish()
    assert done.status == 1, done.text
    assert re.search(r"host-b can't be reached, .* exited with status 255; started as: ssh .* host-b ", done.stderr), done.text
    assert "Connection refused" in done.stderr, done.text
    programs.wait_until_gone()


def test_a_cut_cable_ends_the_job_on_both_sides(programs, hosts):
    conf = "keep_alive_interval=0.2,lease=3,lost_after=4.5,rejoin_timeout=1,join_timeout=10"
    job = hosts.start("host-a,host-b", "--rdzv-conf", conf, "sh", "-c", STAY)
    job.wait_for("rank 0 of 2"), job.wait_for("rank 1 of 2")
    hosts.net.cut(1)
    done = job.finish()
    assert done.status == 1 and "no word from host-b" in done.stderr, done.text
    programs.wait_until_gone()
