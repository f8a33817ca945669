package processes

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// hosts are network and host name namespaces that represent machines. Each has eth0 with address
// 10.77.0.i (from 1). It is a veth whose other end is on a bridge in another namespace, or a TUN
// device. The packets of a TUN device pass through this process, which may delay or lose them (few
// kernels have netem). Everything is removed at the end of the test.
type hosts struct {
	bridge  *exec.Cmd // a process in the bridge's namespace; nil: TUN devices
	tun     []*os.File
	holder  []*exec.Cmd // one process per host, through which others enter its namespaces
	delay   atomic.Int64
	lossPer atomic.Int64 // lost packets per thousand
	over    chan struct{}
	wires   sync.WaitGroup
}

// newHosts makes n hosts, or skips the test with the operation that the machine forbids.
func newHosts(t *testing.T, n int, veth bool) *hosts {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, tool := range []string{"ip", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("hosts stand in network namespaces, which are entered with %s: %v", tool, err)
		}
	}
	h := &hosts{over: make(chan struct{})}
	t.Cleanup(h.close)
	forbidden := func(err error) {
		if err != nil {
			t.Skipf("this machine gives no network namespaces with a veth or TUN device (root has them on most): %v", err)
		}
	}
	if veth {
		forbidden(h.within(func() (err error) {
			h.bridge, err = inNamespace("bridge", "ip link add br0 type bridge", "ip link set br0 up")
			return err
		}))
	}
	for i := range n {
		forbidden(h.within(func() error { return h.make(i) }))
	}
	for i := range h.tun {
		h.wires.Go(func() { h.forward(i) })
	}
	return h
}

// within calls f on a thread that runs nothing else. The thread, and processes that it started, end
// with the hosts.
func (h *hosts) within(f func() error) error {
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, because the thread is in other namespaces
		made <- f()
		<-h.over
	}()
	return <-made
}

// inNamespace moves the thread into new namespaces, runs commands there, and starts a process
// through which others enter.
func inNamespace(name string, lines ...string) (*exec.Cmd, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWUTS); err != nil {
		return nil, os.NewSyscallError("unshare", err)
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return nil, os.NewSyscallError("sethostname", err)
	}
	for _, line := range lines {
		if err := shell(line); err != nil {
			return nil, err
		}
	}
	p := exec.Command("sleep", "1000000")
	// The first process of a process namespace: when it ends, all others of the host end.
	p.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Cloneflags: unix.CLONE_NEWPID}
	return p, p.Start()
}

// shell runs a command, forked from this thread.
func shell(line string) error {
	if out, err := exec.Command("/bin/sh", "-c", line).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

// onBridge runs a command in the namespace of the bridge.
func (h *hosts) onBridge(line string) error {
	return shell(fmt.Sprintf("nsenter -t %d -n %s", h.bridge.Process.Pid, line))
}

func (h *hosts) make(i int) error {
	p, err := inNamespace(fmt.Sprintf("host%d", i+1), "ip link set lo up")
	if err != nil {
		return err
	}
	h.holder = append(h.holder, p)
	if h.bridge != nil {
		err = shell(fmt.Sprintf("ip link add eth0 type veth peer name port%d netns %d", i+1, h.bridge.Process.Pid))
		if err == nil {
			err = h.onBridge(fmt.Sprintf("ip link set port%d master br0 up", i+1))
		}
	} else {
		err = h.addTUN()
	}
	if err != nil {
		return err
	}
	return shell(fmt.Sprintf("ip addr add 10.77.0.%d/24 dev eth0 && ip link set eth0 up", i+1))
}

func (h *hosts) addTUN() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev/net/tun", Err: err}
	}
	r, err := unix.NewIfreq("eth0")
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, r); err != nil {
		return os.NewSyscallError("TUNSETIFF", err)
	}
	h.tun = append(h.tun, os.NewFile(uintptr(fd), "tun")) // the runtime's poller accepts the file only with an interface
	return nil
}

// cut removes a host's link.
func (h *hosts) cut(t *testing.T, i int) {
	t.Helper()
	require.NoError(t, h.onBridge(fmt.Sprintf("ip link set port%d down", i+1)))
}

// forward delivers the packets that a host sends to their destinations.
func (h *hosts) forward(i int) {
	r := rand.New(rand.NewPCG(1, uint64(i)))
	packet := make([]byte, 65536)
	for {
		n, err := h.tun[i].Read(packet)
		if err != nil {
			return
		}
		if n < 20 || packet[0]>>4 != 4 || binary.BigEndian.Uint32(packet[16:])>>8 != 10<<16|77<<8 {
			continue
		}
		to := int(packet[19]) - 1
		if to < 0 || to >= len(h.tun) || r.Int64N(1000) < h.lossPer.Load() {
			continue
		}
		copied := append([]byte(nil), packet[:n]...)
		if d := time.Duration(h.delay.Load()); d > 0 {
			time.AfterFunc(d, func() { _, _ = h.tun[to].Write(copied) })
			continue
		}
		_, _ = h.tun[to].Write(copied)
	}
}

func (h *hosts) close() {
	defer close(h.over)
	all := h.holder
	if h.bridge != nil {
		all = append(all, h.bridge)
	}
	for _, p := range all {
		if p.Process != nil {
			_ = p.Process.Kill()
			_ = p.Wait()
		}
	}
	for _, f := range h.tun {
		_ = f.Close()
	}
	h.wires.Wait()
}

// mpirun starts the binary as one rank a host; the launcher runs on the first. Each rank writes its
// output and its exit status to said, and nothing else ends it.
func (h *hosts) mpirun(t *testing.T, launcher, said string, args ...string) *process {
	t.Helper()
	path, err := exec.LookPath(launcher)
	if err != nil && os.Getenv("SPILLWAY_TEST_MPI") == "" {
		t.Skip(launcher, " is not installed")
	}
	require.NoError(t, err)
	binary, err := built()
	require.NoError(t, err)
	// A replacement for ssh: mpirun calls it with a host and a command, MPICH's with -x before
	// them.
	agent := "#!/bin/sh\n[ \"$1\" != -x ] || shift\nhost=$1; shift\ncase $host in\n"
	var names []string
	for i, p := range h.holder {
		name := fmt.Sprintf("10.77.0.%d", i+1)
		names = append(names, name)
		agent += fmt.Sprintf("%s) exec nsenter -t %d -n -u -p /bin/sh -c \"$*\" ;;\n", name, p.Process.Pid)
	}
	file := filepath.Join(t.TempDir(), "agent")
	require.NoError(t, os.WriteFile(file, []byte(agent+"esac\n"), 0o700))
	line := []string{"-t", fmt.Sprint(h.holder[0].Process.Pid), "-n", "-u", path}
	if launcher == "mpirun.mpich" {
		line = append(line, "-launcher", "ssh", "-launcher-exec", file, "-hosts", strings.Join(names, ","), "-n", fmt.Sprint(len(names)), "-ppn", "1",
			"-iface", "eth0", "-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", "eth0")
	} else {
		line = append(line, "--allow-run-as-root", "--host", strings.Join(names, ","),
			"-np", fmt.Sprint(len(names)), "--map-by", "node", "--oversubscribe", "--mca", "plm_rsh_agent", file, "--mca", "btl", "tcp,self", "--mca", "pml", "ob1",
			"--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24",
			"--mca", "orte_abort_on_non_zero_status", "0", "--mca", "orte_allowed_exit_without_sync", "1")
	}
	line = append(line, "/bin/sh", "-c", `to=$0/$OMPI_COMM_WORLD_RANK$PMI_RANK; "$@" 2>$to.said; echo $? >$to.new; mv $to.new $to.status`, said, binary)
	p := &process{Cmd: exec.Command("nsenter", append(line, args...)...)}
	p.Stdout, p.Stderr = &p.out, &p.errs
	p.WaitDelay = time.Second // a host that is cut off may keep the pipes open
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

// saidOf returns the output of a rank.
func saidOf(dir string, rank int) string {
	text, _ := os.ReadFile(filepath.Join(dir, fmt.Sprint(rank, ".said"))) // "" before the file exists
	return string(text)
}

// statusOf returns a rank's exit status, "" before it has ended.
func statusOf(dir string, rank int) string {
	text, _ := os.ReadFile(filepath.Join(dir, fmt.Sprint(rank, ".status")))
	return strings.TrimSpace(string(text))
}

// Over a network between hosts, fast or slow and losing packets, a run has the bits of one process.
func TestHostsGiveTheBitsOfOneProcess(t *testing.T) {
	t.Parallel()
	one := filepath.Join(t.TempDir(), "one.jsonl")
	p := start(t, tinyWith("--ranks", "4", "--metrics", one)...)
	require.Zero(t, p.end(t), p.errs.String())
	for name, how := range map[string]struct {
		delay    time.Duration
		loss     int64
		by       string
		launcher string
	}{
		"veth": {0, 0, "auto", "mpirun.openmpi"}, "10 ms and 1 % loss": {10 * time.Millisecond, 10, "halving-doubling", "mpirun.openmpi"},
		"veth, MPICH": {0, 0, "auto", "mpirun.mpich"},
	} {
		if name == "veth" && !long.On() { // TestACutLinkEndsTheJob covers it
			continue
		}
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir() // made before the hosts, which write to it until they end
			h := newHosts(t, 4, strings.HasPrefix(name, "veth"))
			h.delay.Store(int64(how.delay))
			h.lossPer.Store(how.loss)
			many := filepath.Join(dir, "many.jsonl")
			p := h.mpirun(t, how.launcher, dir, tinyWith("--metrics", many, "--collectives", how.by)...)
			if how.launcher == "mpirun.openmpi" {
				require.Zero(t, p.end(t), saidOf(dir, 0)+p.errs.String())
			} else { // UCX over TCP may not come back from MPI_Finalize, which loses Hydra a status: the bits are there before
				waitFor(t, "end of the run", func() bool {
					require.Contains(t, []string{"", "0"}, statusOf(dir, 0), saidOf(dir, 0))
					text, _ := os.ReadFile(many)
					return bytes.Contains(text, []byte("params_sha256")) && bytes.HasSuffix(text, []byte("\n"))
				})
				_ = p.Process.Kill()
				_ = p.Wait()
			}
			require.Equal(t, outcomeOf(t, one), outcomeOf(t, many))
		})
	}
}

// A host whose link is cut during the run is named, and every rank ends within the timeout with
// status 3 and a peer's name. The isolated one names the peer that it misses.
func TestACutLinkEndsTheJob(t *testing.T) {
	t.Parallel()
	h := newHosts(t, 4, true)
	dir := t.TempDir()
	p := h.mpirun(t, "mpirun.openmpi", dir, tinyWith("--steps", "1000000", "--timeout", "5s")...)
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	waitFor(t, "first step", func() bool {
		require.Empty(t, ended, "the job ended before it began: %s%s", saidOf(dir, 0), &p.errs)
		return strings.Contains(saidOf(dir, 0), "step 1/")
	})
	h.cut(t, 2)
	cutAt := time.Now()
	status := func(rank int) string { return statusOf(dir, rank) }
	waitFor(t, "end of every rank, on the host that is cut off too", func() bool {
		return status(0) != "" && status(1) != "" && status(2) != "" && status(3) != ""
	})
	t.Logf("ended %v after the cut", time.Since(cutAt).Round(time.Millisecond))
	// Remaining mpirun processes, here and on the unreachable host, are not tested.
	require.NoError(t, h.holder[2].Process.Kill())
	_ = p.Process.Kill()
	<-ended
	for rank := range h.holder {
		said := saidOf(dir, rank)
		require.Equal(t, "3", status(rank), "rank %d: %s", rank, said)
		lost := `rank 2 \(host host3, process`
		if rank == 2 {
			lost = `rank [013] \(host host[124], process`
		}
		require.Regexp(t, `timeout: .*`+lost, said, "rank %d", rank)
		require.Contains(t, said, fmt.Sprintf("the last operations of rank %d", rank))
	}
	require.Regexp(t, `warning: rank 2 \(host host3, process \d+\) gives no sign of life`, saidOf(dir, 0))
}
