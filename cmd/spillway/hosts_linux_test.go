package main

import (
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
)

// hosts are network and host name namespaces, which stand for machines. Each has a TUN
// device, eth0 with address 10.77.0.i (from 1); packets between them pass through this
// process, which may delay, lose or cut them. All of it ends with the test.
type hosts struct {
	tun     []*os.File
	holder  []*exec.Cmd // a process in each, by which others get in
	delay   atomic.Int64
	lossPer atomic.Int64 // packets of a thousand
	cut     []atomic.Bool
	over    chan struct{}
	wires   sync.WaitGroup
}

// newHosts makes n hosts, or skips the test and says what the machine forbids.
func newHosts(t *testing.T, n int) *hosts {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, tool := range []string{"ip", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("hosts stand in network namespaces, which are entered with %s: %v", tool, err)
		}
	}
	h := &hosts{cut: make([]atomic.Bool, n), over: make(chan struct{})}
	t.Cleanup(h.close)
	for i := range n {
		if err := h.add(i); err != nil {
			t.Skipf("this machine gives no network namespaces with a TUN device (root has them on most): %v", err)
		}
	}
	for i := range n {
		h.wires.Go(func() { h.forward(i) })
	}
	return h
}

// add makes a host, on a thread that is its alone and ends with it.
func (h *hosts) add(i int) error {
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread is in another world
		made <- h.make(i)
		<-h.over // the holder ends with the thread that made it
	}()
	return <-made
}

func (h *hosts) make(i int) error {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWUTS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Sethostname(fmt.Appendf(nil, "host%d", i+1)); err != nil {
		return os.NewSyscallError("sethostname", err)
	}
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
	h.tun = append(h.tun, os.NewFile(uintptr(fd), "tun")) // which the poller takes only with an interface
	for _, line := range []string{fmt.Sprintf("ip addr add 10.77.0.%d/24 dev eth0", i+1), "ip link set eth0 up", "ip link set lo up"} {
		if out, err := exec.Command("/bin/sh", "-c", line).CombinedOutput(); err != nil { // forked from this thread
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
	}
	p := exec.Command("sleep", "1000000")
	// The first process of a process namespace: with it all others of the host end.
	p.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Cloneflags: unix.CLONE_NEWPID}
	h.holder = append(h.holder, p)
	return p.Start()
}

// forward takes what a host sends and gives it to whom it is for.
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
		if to < 0 || to >= len(h.tun) || h.cut[i].Load() || h.cut[to].Load() || r.Int64N(1000) < h.lossPer.Load() {
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
	for _, p := range h.holder {
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

// runs tells whether a host has a process of the binary under test.
func (h *hosts) runs(t *testing.T, i int) bool {
	t.Helper()
	binary, err := built()
	require.NoError(t, err)
	space, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", h.holder[i].Process.Pid))
	require.NoError(t, err)
	all, err := filepath.Glob("/proc/[0-9]*")
	require.NoError(t, err)
	for _, p := range all {
		of, err := os.Readlink(p + "/ns/net")
		if exe, failed := os.Readlink(p + "/exe"); err == nil && failed == nil && of == space && exe == binary {
			return true
		}
	}
	return false
}

// mpirun starts a program as one rank a host; the launcher runs on the first.
func (h *hosts) mpirun(t *testing.T, args ...string) *process {
	t.Helper()
	launcher, err := exec.LookPath("mpirun.openmpi")
	if err != nil && os.Getenv("SPILLWAY_TEST_MPI") == "" {
		t.Skip("mpirun.openmpi is not installed")
	}
	require.NoError(t, err)
	binary, err := built()
	require.NoError(t, err)
	// What mpirun takes for ssh: it is called with a host and a command.
	agent := "#!/bin/sh\nhost=$1; shift\ncase $host in\n"
	var names []string
	for i, p := range h.holder {
		name := fmt.Sprintf("10.77.0.%d", i+1)
		names = append(names, name)
		agent += fmt.Sprintf("%s) exec nsenter -t %d -n -u -p /bin/sh -c \"$*\" ;;\n", name, p.Process.Pid)
	}
	file := filepath.Join(t.TempDir(), "agent")
	require.NoError(t, os.WriteFile(file, []byte(agent+"esac\n"), 0o700))
	line := []string{"-t", fmt.Sprint(h.holder[0].Process.Pid), "-n", "-u", launcher, "--allow-run-as-root", "--host", strings.Join(names, ","),
		"-np", fmt.Sprint(len(names)), "--map-by", "node", "--oversubscribe", "--mca", "plm_rsh_agent", file, "--mca", "btl", "tcp,self", "--mca", "pml", "ob1",
		"--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "oob_tcp_if_include", "10.77.0.0/24", binary}
	p := &process{Cmd: exec.Command("nsenter", append(line, args...)...)}
	p.Stdout, p.Stderr = &p.out, &p.errs
	p.WaitDelay = time.Second // a host that is cut off may hold them open
	require.NoError(t, p.Start())
	t.Cleanup(func() { _ = p.Process.Kill() })
	return p
}

// Over a network between hosts, quick or slow and losing packets, a run has the bits
// of one process.
func TestHostsGiveTheBitsOfOneProcess(t *testing.T) {
	h := newHosts(t, 4)
	one := filepath.Join(t.TempDir(), "one.jsonl")
	p := start(t, tinyWith("--ranks", "4", "--metrics", one)...)
	require.Zero(t, p.end(t), p.errs.String())
	for _, how := range []struct {
		delay time.Duration
		loss  int64
		flags string
	}{{0, 0, "auto"}, {10 * time.Millisecond, 10, "halving-doubling"}} {
		h.delay.Store(int64(how.delay))
		h.lossPer.Store(how.loss)
		many := filepath.Join(t.TempDir(), "many.jsonl")
		p := h.mpirun(t, tinyWith("--metrics", many, "--collectives", how.flags)...)
		require.Zero(t, p.end(t), p.errs.String()+p.out.String())
		require.Equal(t, outcomeOf(t, one), outcomeOf(t, many))
	}
}

// A host whose link is cut in mid-run is named, and the job ends within the timeout.
func TestACutLinkEndsTheJob(t *testing.T) {
	h := newHosts(t, 3)
	p := h.mpirun(t, tinyWith("--steps", "1000000", "--timeout", "5s")...)
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	waitFor(t, "first step", func() bool {
		require.Empty(t, ended, "the job ended before it began: %s%s", &p.errs, &p.out)
		return strings.Contains(p.errs.String()+p.out.String(), "step ")
	})
	h.cut[2].Store(true)
	cutAt := time.Now()
	waitFor(t, "word on who is lost", func() bool {
		said := p.errs.String() + p.out.String()
		return strings.Contains(said, "rank 2 (host host3, process") && strings.Contains(said, "gives no sign of life")
	})
	waitFor(t, "end of every rank, on the host that is cut off too", func() bool {
		for i := range h.holder {
			if h.runs(t, i) {
				return false
			}
		}
		return true
	})
	t.Logf("ended %v after the cut", time.Since(cutAt).Round(time.Millisecond))
	// What is left of mpirun, here and on the host that it does not reach, is its own
	// matter.
	require.NoError(t, h.holder[2].Process.Kill())
	_ = p.Process.Kill()
	require.Error(t, <-ended)
	said := p.errs.String() + p.out.String()
	require.Regexp(t, `timeout: .*rank 2 \(host host3, process`, said)
	require.Contains(t, said, "the last operations of rank 0")
}
