// Command attention models the bytes that the backward of attention on tensor cores moves again
// because the card's cache has evicted them, by the order in which blocks process tiles of keys. It
// needs no GPU, and nothing that it prints was measured on one: README.md has its output.
//
//	go run ./benchmarks/cuda/attention
package main

import (
	"container/list"
	"fmt"
)

// The model: GPT-2 1.5B at 16 × 1,024 tokens on 132 multiprocessors of 3 blocks each.
const (
	heads, tiles, slots, layers = 400, 16, 396, 48
	tileRows, width             = 64, 64
	operands                    = 2 * tileRows * width * 2 // bytes of a tile of queries and of dy
	sums                        = tileRows * width * 4     // bytes of a tile of dq's sums
)

// tile is the work of one block: a head and its tile of keys.
type tile struct{ head, keys int }

// spreadOrder is the order of struct Order of kernels/cuda/src/flash.cuh.
func spreadOrder(spread int) (order []tile) {
	for row := range heads + spread*(tiles-1) {
		for keys := range tiles {
			if head := row - spread*keys; head >= 0 && head < heads {
				order = append(order, tile{head, keys})
			}
		}
	}
	return order
}

// groupOrder orders groups of heads one after the other, and in each group the tiles by number.
func groupOrder(size int) (order []tile) {
	for begin := 0; begin < heads; begin += size {
		for keys := range tiles {
			for head := begin; head < min(begin+size, heads); head++ {
				order = append(order, tile{head, keys})
			}
		}
	}
	return order
}

// cache is a cache that evicts the least recently used entry. Written entries go to memory when
// they are evicted.
type cache struct {
	room, used int
	at         map[any]*list.Element
	order      list.List
	seen       map[any]bool
	again      int // bytes read or written beyond the first read and the last write
}

type line struct {
	key   any
	bytes int
	dirty bool
}

func (c *cache) touch(key any, bytes int, written, fresh bool) {
	e := c.at[key]
	if e == nil {
		if c.seen[key] && !fresh {
			c.again += bytes
		}
		c.seen[key] = true
		e = c.order.PushFront(&line{key, bytes, false})
		c.at[key], c.used = e, c.used+bytes
	}
	c.order.MoveToFront(e)
	e.Value.(*line).dirty = written
	for c.used > c.room {
		last := c.order.Remove(c.order.Back()).(*line)
		if last.dirty {
			c.again += last.bytes
		}
		delete(c.at, last.key)
		c.used -= last.bytes
	}
}

// run processes the tiles with slots blocks, each one step at a time when its turn has come, on a
// cache of room bytes. It returns the bytes of a layer that are moved again, and the share of the
// blocks' time in which they wait.
func run(order []tile, room int) (again int, waits float64) {
	type query struct{ head, at int }
	type sum struct{ head, at int }
	type block struct {
		tile
		at int
	}
	c := &cache{room: room, at: map[any]*list.Element{}, seen: map[any]bool{}}
	turn := map[query]int{}
	var active []block
	times, waited := 0, 0
	for len(order) > 0 || len(active) > 0 {
		for len(active) < slots && len(order) > 0 {
			c.touch(order[0], operands, false, true) // keys and values: once
			active, order = append(active, block{order[0], order[0].keys}), order[1:]
		}
		come := make([]bool, len(active))
		for i, b := range active {
			come[i] = turn[query{b.head, b.at}] == b.keys
		}
		var left []block
		for i, b := range active {
			if !come[i] {
				waited++
				left = append(left, b)
				continue
			}
			c.touch(query{b.head, b.at}, operands, false, false)
			c.touch(sum{b.head, b.at}, sums, b.keys < b.at, b.keys == 0)
			turn[query{b.head, b.at}]++
			if b.at++; b.at < tiles {
				left = append(left, b)
			}
		}
		active = left
		times++
	}
	return c.again, float64(waited) / float64(times*slots)
}

func main() {
	fmt.Println("| order | cache | bytes moved again, a step | blocks wait |")
	fmt.Println("| --- | --- | --- | --- |")
	for _, o := range []struct {
		name  string
		order []tile
	}{
		{"first tiles of all heads first", groupOrder(heads)}, {"groups of 64 heads", groupOrder(64)}, {"groups of 100 heads", groupOrder(100)},
		{"next tile 4 heads later", spreadOrder(4)}, {"next tile 7 heads later (chosen)", spreadOrder(7)}, {"next tile 10 heads later", spreadOrder(10)},
	} {
		for _, room := range []int{30e6, 40e6} {
			again, waits := run(o.order, room)
			fmt.Printf("| %s | %d MB | %.1f GB | %.0f %% |\n", o.name, room/1e6, float64(again)*layers/1e9, 100*waits)
		}
	}
}
