//go:build unix

// Command step times two training programs step by step, in turn. While one runs a step the other
// is stopped (SIGSTOP), so that both have the same state of the machine. Each program must write a
// line that starts with "{" on its standard output when a step ends.
//
//	go run ./benchmarks/step -pairs 15 \
//	    -a "spillway train … --metrics /dev/stdout" -b "python3 torch_gpt2.py …" -csv pairs.csv
//
// It prints both medians, the ratio b/a pair by pair (median, smallest, largest), and each
// program's highest resident memory. Beside the time it prints the processor time that the
// program's threads used, which varies less on a shared machine.
//
//	go run ./benchmarks/step -trace FILE
//
// sums a trace of spillway train by operation and stream. For each other stream it prints the share
// of its time in which the compute stream worked too.
package main

import (
	"bufio"
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
)

func main() {
	a := flag.String("a", "", "first command")
	b := flag.String("b", "", "second command")
	pairs := flag.Int("pairs", 15, "pairs of steps that count")
	warm := flag.Int("warm", 2, "steps of each before the first pair")
	out := flag.String("csv", "", "file for all pairs")
	trace := flag.String("trace", "", "instead, add up the trace in this file")
	flag.Parse()
	bench.Main("step", func() error {
		if *trace != "" {
			return breakdown(*trace)
		}
		return run(*a, *b, *pairs, *warm, *out)
	})
}

// program is a running training program, stopped between its steps.
type program struct {
	name  string
	cmd   *exec.Cmd
	lines *bufio.Reader
}

func start(name, command string) (*program, error) {
	words := strings.Fields(command)
	if len(words) == 0 {
		return nil, fmt.Errorf("-%s: the command is missing", name)
	}
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("-%s: %w", name, err)
	}
	p := &program{name: name, cmd: cmd, lines: bufio.NewReader(stdout)}
	return p, nil
}

// step lets the program run until it reports a step, and stops it.
func (p *program) step() (time.Duration, error) {
	began := time.Now()
	if err := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGCONT); err != nil {
		return 0, fmt.Errorf("-%s: continue: %w", p.name, err)
	}
	for {
		line, err := p.lines.ReadString('\n')
		if strings.HasPrefix(line, "{") {
			took := time.Since(began)
			return took, syscall.Kill(-p.cmd.Process.Pid, syscall.SIGSTOP)
		}
		if err != nil {
			return 0, fmt.Errorf("-%s ended before its steps: %w", p.name, err)
		}
	}
}

// cpu returns the processor time that the program has used so far, user and
// system, in steps of 10 ms.
func (p *program) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		return 0, fmt.Errorf("-%s: %w", p.name, err)
	}
	// The name, field 2, may hold spaces; it ends with the last parenthesis.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int64
	for _, i := range []int{14 - 3, 15 - 3} { // utime and stime, counted from 1; state, field 3, is the first one here
		if i >= len(fields) {
			return 0, fmt.Errorf("-%s: /proc/PID/stat has %d fields behind the name", p.name, len(fields))
		}
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("-%s: /proc/PID/stat: %w", p.name, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil
}

func (p *program) peakResident() string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return "unknown"
	}
	for _, line := range strings.Split(string(text), "\n") {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

func run(a, b string, pairs, warm int, out string) (err error) {
	var programs [2]*program
	for i, command := range []string{a, b} {
		p, err := start(string(rune('a'+i)), command)
		if err != nil {
			return err
		}
		programs[i] = p
		defer func() {
			_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
			_ = p.cmd.Wait()
		}()
		for range warm {
			if _, err := p.step(); err != nil {
				return err
			}
		}
	}
	rows := [][]string{{"pair", "a_seconds", "b_seconds", "b_over_a", "a_cpu_seconds", "b_cpu_seconds", "cpu_b_over_a"}}
	var times [2][]float64
	var ratios, cpuRatios []float64
	for k := range pairs {
		var t, cpu [2]float64
		for i, p := range programs {
			began, err := p.cpu()
			if err != nil {
				return err
			}
			d, err := p.step()
			if err != nil {
				return err
			}
			ended, err := p.cpu()
			if err != nil {
				return err
			}
			t[i], cpu[i] = d.Seconds(), (ended - began).Seconds()
			times[i] = append(times[i], t[i])
		}
		ratios = append(ratios, t[1]/t[0])
		cpuRatios = append(cpuRatios, cpu[1]/cpu[0])
		rows = append(rows, []string{strconv.Itoa(k + 1), format(t[0]), format(t[1]), format(t[1] / t[0]), format(cpu[0]), format(cpu[1]), format(cpu[1] / cpu[0])})
		if err := write(out, rows); err != nil {
			return err
		}
		fmt.Printf("pair %2d  a %8.4f s  b %8.4f s  b/a %.3f\n", k+1, t[0], t[1], t[1]/t[0])
	}
	for i, v := range times {
		fmt.Printf("%s: median %s s a step, highest resident memory %s\n", programs[i].name, bench.Spread(v, "%.4f"), programs[i].peakResident())
	}
	fmt.Printf("b/a: median %s of %d pairs\n", bench.Spread(ratios, "%.3f"), len(ratios))
	fmt.Printf("b/a of processor time: median %s\n", bench.Spread(cpuRatios, "%.3f"))
	return nil
}

// write stores the pairs so far, so that an interrupted run loses none.
func write(out string, rows [][]string) error {
	if out == "" {
		return nil
	}
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	w := csv.NewWriter(f)
	return errors.Join(w.WriteAll(rows), f.Close())
}

func format(v float64) string { return strconv.FormatFloat(v, 'f', 5, 64) }
