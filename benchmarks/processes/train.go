//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// program is a training program of one or several processes, stopped between its steps.
type program struct {
	name    string
	cmd     *exec.Cmd
	lines   *bufio.Reader
	seconds []float64
	pss     int64   // the most so far, kB
	loss    float64 // of the last step
}

func begin(name string, words ...string) (*program, error) {
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return &program{name: name, cmd: cmd, lines: bufio.NewReader(out)}, nil
}

// tree lists a process and all that it and they have started.
func tree(pid int) (pids []int) {
	pids = []int{pid}
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, t := range tasks { // any thread may have started them
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, t.Name()))
		for _, f := range strings.Fields(string(text)) {
			if child, err := strconv.Atoi(f); err == nil {
				pids = append(pids, tree(child)...)
			}
		}
	}
	return pids
}

func (p *program) signal(s syscall.Signal) {
	for _, pid := range tree(p.cmd.Process.Pid) {
		_ = syscall.Kill(pid, s) // one may just have ended
	}
}

// step lets the program run until it reports a step, and stops it.
func (p *program) step() (time.Duration, error) {
	began := time.Now()
	p.signal(syscall.SIGCONT)
	for {
		line, err := p.lines.ReadString('\n')
		if strings.HasPrefix(line, "{") {
			took := time.Since(began)
			p.signal(syscall.SIGSTOP)
			var said struct{ Loss float64 }
			if err := json.Unmarshal([]byte(line), &said); err != nil {
				return 0, fmt.Errorf("%s: a step's line %q: %w", p.name, line, err)
			}
			p.loss = said.Loss
			p.pss = max(p.pss, pssOf(tree(p.cmd.Process.Pid)))
			return took, nil
		}
		if err != nil {
			return 0, fmt.Errorf("%s ended before its steps: %w", p.name, errors.Join(err, p.cmd.Wait()))
		}
	}
}

func (p *program) end() {
	p.signal(syscall.SIGKILL)
	_ = p.cmd.Wait()
}

// pssOf is the proportional set size of processes together, kB: what several of them
// map counts once.
func pssOf(pids []int) (sum int64) {
	for _, pid := range pids {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
				n, _ := strconv.ParseInt(f[1], 10, 64)
				sum += n
			}
		}
	}
	return sum
}

// warm is how many steps of each side don't count.
const warm = 2

// training is what all sides train, and the peer's command.
type training struct {
	binary, model, data, precision, peer string
	batch, seq, rounds                   int
}

func (t *training) measure() error {
	if t.model == "" || t.data == "" {
		return errors.New("train needs -model DIR and -data FILE")
	}
	rounds, peer := t.rounds, t.peer
	steps := strconv.Itoa(rounds + warm + 1)
	common := []string{"--model", t.model, "--init", t.model, "--data", t.data, "--order", "sequential", "--batch", strconv.Itoa(t.batch), "--seq", strconv.Itoa(t.seq),
		"--precision", t.precision, "--steps", steps, "--metrics", "/dev/stdout"}
	over := append([]string{t.binary, "launch", "-n", "2", "--", "train"}, common...)
	sides := map[string][]string{
		"2 processes, ZeRO-3": append(over[:len(over):len(over)], "--zero", "3"),
		"2 processes, ZeRO-0": append(over[:len(over):len(over)], "--zero", "0"),
		"1 process, ZeRO-3":   append(append([]string{t.binary, "train", "--ranks", "2"}, common...), "--zero", "3"),
	}
	order := []string{"2 processes, ZeRO-3", "2 processes, ZeRO-0", "1 process, ZeRO-3"}
	if peer != "" {
		sides["peer"] = strings.Fields(peer)
		order = append(order, "peer")
	}
	programs := map[string]*program{}
	for _, name := range order {
		p, err := begin(name, sides[name]...)
		if err != nil {
			return err
		}
		defer p.end()
		programs[name] = p
		for range warm { // alone: the others are stopped, or not there yet
			if _, err := p.step(); err != nil {
				return err
			}
		}
	}
	for range rounds {
		for _, name := range order {
			took, err := programs[name].step()
			if err != nil {
				return err
			}
			programs[name].seconds = append(programs[name].seconds, took.Seconds())
		}
	}
	fmt.Printf("A step of 2 ranks × %d rows of %d tokens in %s; median (least to most) of %d rounds, in each of which every side takes a step and the others are stopped. The losses are those of step %d.\n\n", t.batch, t.seq, t.precision, rounds, rounds+warm)
	fmt.Printf("| | s a step | tokens/s | PSS of all its processes | loss |\n| --- | --- | --- | --- | --- |\n")
	for _, name := range order {
		p := programs[name]
		var rate []float64
		for _, s := range p.seconds {
			rate = append(rate, float64(2*t.batch*t.seq)/s)
		}
		fmt.Printf("| %s | %s | %s | %.2f GB | %.4f |\n", name, spread(p.seconds, "%.3f"), spread(rate, "%.0f"), float64(p.pss)*1024/1e9, p.loss)
	}
	z3, z0, one := programs[order[0]], programs[order[1]], programs[order[2]]
	fmt.Printf("\n| bar | measured, pair by pair | met |\n| --- | --- | --- |\n")
	bar := func(what string, v []float64, limit float64, least bool) {
		fmt.Printf("| %s | %s | %s |\n", what, spread(v, "%.3f"), met(v, limit, least))
	}
	bar("ZeRO-3 ÷ ZeRO-0 ≤ 1.15", ratios(z3.seconds, z0.seconds), 1.15, false)
	bar("2 processes ÷ 1 ≤ 1.10", ratios(z3.seconds, one.seconds), 1.10, false)
	if p := programs["peer"]; p != nil {
		bar("peer ÷ 2 processes, ZeRO-3, time ≥ 2", ratios(p.seconds, z3.seconds), 2, true)
		bar("2 processes, ZeRO-3 ÷ peer, PSS ≤ 0.6", []float64{float64(z3.pss) / float64(p.pss)}, 0.6, false)
	}
	return nil
}
