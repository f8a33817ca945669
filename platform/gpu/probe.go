package gpu

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// probeBytes is the number of bytes that the probe sends from one GPU to another.
const probeBytes = 64 << 10

// probed is the memory and stream of one GPU for the probe.
type probed struct {
	at     driver.Address // data to send, followed by room for received data
	stream driver.Stream
	filled driver.Event
}

// probe sends data between every two GPUs and compares what arrives. On some machines it
// arrives changed without an error, because an IOMMU intercepts traffic between two cards on
// PCIe.
func (c *cudaPlatform) probe() (err error) {
	if len(c.cards) < 2 {
		return nil
	}
	ends := make([]probed, len(c.cards))
	for i, k := range c.cards {
		if err == nil {
			err = k.do(func() error { return ends[i].open(c.api, word(i)) })
		}
	}
	for i := range c.cards {
		for j, to := range c.cards {
			if i != j && err == nil {
				err = to.do(func() error { return c.send(ends, i, j) })
			}
		}
	}
	for i, k := range c.cards {
		err = errors.Join(err, k.do(func() error { return ends[i].close(c.api) }))
	}
	return err
}

// word returns the word that fills the data of GPU i.
func word(i int) uint32 { return 0x5ca1ab1e + uint32(i)*0x01010101 }

func (p *probed) open(api driver.API, value uint32) (err error) {
	if p.stream, err = api.NewStream(); err != nil {
		return err
	}
	if p.at, err = api.Alloc(2 * probeBytes); err != nil {
		return err
	}
	if p.filled, err = api.NewEvent(false); err != nil {
		return err
	}
	return errors.Join(api.Fill32(p.at, value, probeBytes/4, p.stream), api.Record(p.filled, p.stream))
}

func (p *probed) close(api driver.API) (err error) {
	if p.stream != 0 {
		err = errors.Join(api.Synchronize(p.stream), api.DestroyStream(p.stream))
	}
	if p.at != 0 {
		err = errors.Join(err, api.Free(p.at))
	}
	if p.filled != 0 {
		err = errors.Join(err, api.DestroyEvent(p.filled))
	}
	return err
}

// send copies GPU i's data to GPU j; it must be called on j's thread.
func (c *cudaPlatform) send(ends []probed, i, j int) error {
	from, to := c.cards[i], c.cards[j]
	p, _, err := c.api.HostAlloc(probeBytes)
	if err != nil {
		return err
	}
	got, s := ends[j].at+probeBytes, ends[j].stream
	if err = c.api.Wait(s, ends[i].filled); err == nil {
		err = errors.Join(c.api.CopyPeer(got, to.handle, ends[i].at, from.handle, probeBytes, s), c.api.CopyToHost(p, got, probeBytes, s))
	}
	err = errors.Join(err, c.api.Synchronize(s))
	words := unsafe.Slice((*uint32)(p), probeBytes/4)
	if err == nil && slices.ContainsFunc(words, func(w uint32) bool { return w != word(i) }) {
		err = fmt.Errorf("what GPU %d sends to GPU %d arrives changed (an IOMMU between the cards does that: turn it off, or PCI's access control services; or have CUDA_VISIBLE_DEVICES show one GPU)",
			from.gpu.Ordinal, to.gpu.Ordinal)
	}
	return errors.Join(err, c.api.HostFree(p))
}
