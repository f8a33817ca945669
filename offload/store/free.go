package store

import "github.com/spillway-ml/spillway/internal/filesys"

// Free returns the bytes that are free, for unprivileged users, on the filesystem of a folder, or
// of its nearest existing parent. It returns 0 if that is unknown, or for "".
func Free(dir string) int64 {
	if dir == "" {
		return 0
	}
	room, _ := filesys.RoomAt(filesys.System, dir)
	return room.Free
}
