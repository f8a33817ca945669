package gpu

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/internal/thread"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/plan"
)

// card is one GPU and the ranks that run on it.
type card struct {
	gpu    driver.Device
	ranks  []int          // ranks of this process, consecutive
	host   *thread.Thread // the thread on which the GPU's context is current
	handle driver.Context
	lib    Kernels

	used      int64 // bytes in use before this process used the GPU; −1: unknown
	available int64 // bytes that this process may use, including its context
	others    int64 // bytes that other processes use; −1: unknown
	outside   int64 // bytes that each rank needs outside its arena
}

// deal assigns GPUs to the ranks of a process: one each if there are enough. Otherwise equally many
// consecutive ranks share each GPU. All GPUs must be of one kind, so that the assignment does not
// change the bits.
func deal(ranks []int, list []driver.Device) ([]*card, error) {
	n := min(len(ranks), len(list))
	each := len(ranks) / n
	if each*n != len(ranks) {
		return nil, fmt.Errorf("Config.Ranks %d: as many ranks don't share the %d GPUs that the driver shows evenly; take a multiple of %d, or have CUDA_VISIBLE_DEVICES show fewer GPUs (one is shared by all ranks)",
			len(ranks), len(list), len(list))
	}
	cards := make([]*card, n)
	for i := range cards {
		a, b := &list[0], &list[i]
		if a.Major != b.Major || a.Minor != b.Minor || a.SMs != b.SMs {
			return nil, fmt.Errorf("Config.Device cuda: GPU %d, %s, and GPU %d, %s, differ, so that ranks would compute other bits; have CUDA_VISIBLE_DEVICES show GPUs of one kind",
				a.Ordinal, kind(a), b.Ordinal, kind(b))
		}
		cards[i] = &card{gpu: *b, ranks: ranks[i*each : (i+1)*each]}
	}
	return cards, nil
}

// kind describes the properties of a GPU that affect the bits of results.
func kind(d *driver.Device) string {
	return fmt.Sprintf("%s (compute capability %d.%d, %d multiprocessors)", d.Name, d.Major, d.Minor, d.SMs)
}

// do runs f on the GPU's thread.
func (k *card) do(f func() error) error { return k.host.Do(f) }

// retain records the GPU's memory in use and makes its context current.
func (k *card) retain(parts *Parts, api driver.API) (err error) {
	if k.used, err = parts.Used(k.gpu.UUID); err != nil {
		k.used = -1 // NVML reports no value
	}
	handle, err := api.Retain(k.gpu.Ordinal)
	if err != nil {
		return err
	}
	k.handle = handle
	return api.SetCurrent(handle)
}

// measure computes the memory available to this process if its context takes outside bytes. If NVML
// reported the memory in use before, the context's real size is measured instead.
func (k *card) measure(api driver.API, outside int64) error {
	free, total, err := api.MemInfo()
	if err != nil {
		return err
	}
	if k.others = k.used; k.used >= 0 {
		k.available = max(free, total-k.used)
		outside = k.available - free + GuessedOutside
	} else {
		k.available = min(total, free+outside)
	}
	ranks := int64(len(k.ranks))
	k.outside = (outside + ranks - 1) / ranks
	return nil
}

func (k *card) close(api driver.API) (err error) {
	if k.lib != nil {
		err = k.lib.Close()
	}
	if k.handle != 0 {
		err = errors.Join(err, api.Release(k.gpu.Ordinal))
	}
	return err
}

// link enables access between the GPUs' memories, so that copies between them take the shortest
// path.
func (c *cudaPlatform) link() error {
	for _, from := range c.cards {
		for _, to := range c.cards {
			if from == to {
				continue
			}
			err := from.do(func() error {
				ok, err := c.api.CanAccessPeer(from.gpu.Ordinal, to.gpu.Ordinal)
				if ok && err == nil {
					ok, err = c.api.EnablePeerAccess(to.handle)
				}
				if !ok && err == nil {
					c.apart = [2]int{from.gpu.Ordinal, to.gpu.Ordinal}
					c.preset.NVLink = 0 // a collective is as slow as its slowest pair
				}
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// About describes the GPUs. The memory is that of the GPU with the least available.
func (c *cudaPlatform) About() string {
	k := c.tight
	which, of := fmt.Sprintf("GPU %d, %s", k.gpu.Ordinal, kind(&k.gpu)), ""
	if n := len(c.cards); n > 1 {
		each := "a rank each"
		if r := len(k.ranks); r > 1 {
			each = fmt.Sprintf("%d ranks each", r)
		}
		which = fmt.Sprintf("%d GPUs, %s, %s", n, kind(&k.gpu), each)
		of = fmt.Sprintf(" on GPU %d", k.gpu.Ordinal)
	}
	line := fmt.Sprintf("%s: %s, of which %s were free", which, plan.Bytes(k.gpu.Memory), plan.Bytes(k.available))
	if k.others > 0 {
		line += fmt.Sprintf(" and %s in use", plan.Bytes(k.others))
	}
	line += of
	if c.apart[0] != c.apart[1] {
		line += fmt.Sprintf("; what GPUs %d and %d exchange goes through the host", c.apart[0], c.apart[1])
	}
	return line + c.nccl.about()
}
