// A client of another language for a member: each case calls as programs do that use this library, and prints one line,
// "ok NAME" or "not ok NAME: WHY". The environment names the member and what is needed to talk to it.
//
//   TARGET       host and port
//   DESCRIPTORS  file with the descriptors of etcd's services
//   AUTHORITY    certificate to trust; without it the client speaks in cleartext
//   CERTIFICATE, KEY  what the client shows, if it shows something
//   MIB          size of the largest answer

import assert from 'node:assert/strict'
import fs from 'node:fs'
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'

const env = process.env
const types = grpc.loadPackageDefinition(loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(env.DESCRIPTORS),
  { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true })).etcdserverpb

const credentials = env.AUTHORITY
  ? grpc.credentials.createSsl(fs.readFileSync(env.AUTHORITY), env.KEY && fs.readFileSync(env.KEY), env.CERTIFICATE && fs.readFileSync(env.CERTIFICATE))
  : grpc.credentials.createInsecure()
const unlimited = { 'grpc.max_receive_message_length': -1, 'grpc.max_send_message_length': -1 }
const connect = (service, options = {}) => new types[service](env.TARGET, credentials, { ...unlimited, ...options })

const kv = connect('KV')
const watches = connect('Watch')
const leases = connect('Lease')

// call makes a promise of a unary call. Its error has grpc's code and details.
const call = (client, method, request, metadata = new grpc.Metadata(), options = {}) =>
  new Promise((resolve, reject) => client[method](request, metadata, options, (err, answer) => err ? reject(err) : resolve(answer)))
// Several of these programs may use one member: each has keys of its own.
const own = key => Buffer.from(key && `${process.pid}/${key}`)
const put = (key, value) => call(kv, 'Put', { key: own(key), value: Buffer.from(value) })
const get = (key, more = {}) => call(kv, 'Range', { key: own(key), ...more })

const fails = async (promise, code, details) => {
  const err = await promise.then(() => assert.fail('it was answered'), e => e)
  assert.equal(err.code, code, err.message)
  if (details !== undefined) assert.equal(err.details, details)
}

// inbox collects what comes on a stream: next waits for one message, and ended for the status.
const inbox = stream => {
  const messages = []
  let wake = () => {}
  let status = null
  stream.on('data', m => { messages.push(m); wake() })
  stream.on('error', () => {}) // the status says it too
  stream.on('status', s => { status = s; wake() })
  const wait = async have => {
    while (!have()) await new Promise(resolve => { wake = resolve })
  }
  return {
    next: async () => {
      await wait(() => messages.length > 0 || status)
      if (messages.length === 0) throw Object.assign(new Error(`the stream ended: ${status.code} ${status.details}`), { code: status.code })
      return messages.shift()
    },
    ended: async () => { await wait(() => status); return status }
  }
}

// watch opens a stream with one watcher.
const watch = async (key, options = {}, metadata = new grpc.Metadata()) => {
  const stream = watches.Watch(metadata, options)
  const box = inbox(stream)
  stream.write({ create_request: { key: own(key) } })
  const created = await box.next()
  assert.equal(created.created, true)
  return { stream, ...box, id: created.watch_id }
}

const cases = {
  async unary () {
    const before = await put('unary', 'one')
    const after = await put('unary', 'two')
    assert.equal(BigInt(after.header.revision), BigInt(before.header.revision) + 1n)
    const got = await get('unary')
    assert.equal(got.kvs.length, 1)
    assert.equal(got.kvs[0].value.toString(), 'two')
    assert.equal(got.kvs[0].version, '2')
  },

  async errors () {
    await fails(put('', 'v'), grpc.status.INVALID_ARGUMENT, 'etcdserver: key is not provided')
    await fails(get('a', { revision: '1000000000' }), grpc.status.OUT_OF_RANGE, 'etcdserver: mvcc: required revision is a future revision')
    await fails(call(leases, 'LeaseRevoke', { ID: '12345' }), grpc.status.NOT_FOUND, 'etcdserver: requested lease not found')
  },

  async 'unimplemented method' () {
    const raw = new grpc.Client(env.TARGET, credentials)
    const bytes = { method: '/etcdserverpb.KV/Nothing', code: grpc.status.UNIMPLEMENTED, details: 'unknown method Nothing for service etcdserverpb.KV' }
    const missing = { method: '/no.Such/Thing', code: grpc.status.UNIMPLEMENTED, details: 'unknown service no.Such' }
    for (const c of [bytes, missing]) {
      await fails(new Promise((resolve, reject) => raw.makeUnaryRequest(c.method, x => x, x => x, Buffer.alloc(0),
        (err, answer) => err ? reject(err) : resolve(answer))), c.code, c.details)
    }
    raw.close()
  },

  async 'watch stream' () {
    const w = await watch('watched')
    const values = Array.from({ length: 300 }, (_, i) => `value ${i}`)
    for (const v of values) await put('watched', v)
    const seen = []
    while (seen.length < values.length) {
      for (const e of (await w.next()).events) seen.push(e.kv.value.toString())
    }
    assert.deepEqual(seen, values)
    w.stream.write({ cancel_request: { watch_id: w.id } })
    assert.equal((await w.next()).canceled, true)
    w.stream.cancel()
    await w.ended()
  },

  async 'deadline of a unary call' () {
    await fails(call(kv, 'Range', { key: own('a') }, new grpc.Metadata(), { deadline: Date.now() - 1000 }), grpc.status.DEADLINE_EXCEEDED)
    await get('a', {}) // the connection goes on
  },

  async 'deadline of a stream' () {
    // The stream must be there before its deadline, and a busy machine takes its time for that.
    for (let limit = 400; ; limit *= 2) {
      const began = Date.now()
      let w
      try {
        w = await watch('deadline', { deadline: began + limit })
      } catch (err) {
        if (err.code !== grpc.status.DEADLINE_EXCEEDED || limit > 10000) throw err
        continue
      }
      assert.equal((await w.ended()).code, grpc.status.DEADLINE_EXCEEDED)
      const took = Date.now() - began
      assert.ok(took >= limit - 10 && took < limit + 4600, `it took ${took} ms of ${limit}`)
      break
    }
    await get('a')
  },

  async 'cancel of a stream' () {
    const w = await watch('cancelled')
    w.stream.cancel()
    assert.equal((await w.ended()).code, grpc.status.CANCELLED)
    await get('a')
  },

  async 'cancel of unary calls' () {
    await Promise.all(Array.from({ length: 200 }, () => new Promise((resolve, reject) => {
      const c = kv.Range({ key: own('a') }, err => {
        if (err && err.code !== grpc.status.CANCELLED) reject(err); else resolve()
      })
      setTimeout(() => c.cancel(), Math.random() * 3)
    })))
    await get('a')
  },

  async 'large messages' () {
    const part = Buffer.alloc(1 << 20, 'x')
    for (let i = 0; i < Number(env.MIB); i++) await put(`large/${String(i).padStart(4, '0')}`, part)
    const got = await get('large/', { range_end: own('large0') })
    assert.equal(got.kvs.length, Number(env.MIB))
    for (const item of got.kvs) assert.ok(part.equals(item.value))
    const small = connect('KV', { 'grpc.max_receive_message_length': 1 << 20 })
    await fails(call(small, 'Range', { key: own('large/'), range_end: own('large0') }), grpc.status.RESOURCE_EXHAUSTED)
    small.close()
    await call(kv, 'DeleteRange', { key: own('large/'), range_end: own('large0') })
  },

  async 'too large messages' () {
    await fails(put('large', Buffer.alloc(1600 << 10)), grpc.status.INVALID_ARGUMENT, 'etcdserver: request is too large')
    await fails(put('large', Buffer.alloc(3 << 20)), grpc.status.RESOURCE_EXHAUSTED)
    await get('a')
  },

  async metadata () {
    const md = new grpc.Metadata()
    md.set('hasleader', 'true')
    md.set('some-bin', Buffer.from([0, 1, 255, 254]))
    md.set('long', 'x'.repeat(6000))
    await call(kv, 'Range', { key: own('a') }, md)
    const w = await watch('metadata', {}, md)
    await put('metadata', 'v')
    assert.equal((await w.next()).events.length, 1)
    w.stream.cancel()
    await w.ended()
  },

  async gzip () {
    const zipped = connect('KV', { 'grpc.default_compression_algorithm': grpc.compressionAlgorithms.gzip })
    const value = Buffer.alloc(500_000, 'compress me')
    await call(zipped, 'Put', { key: own('gzip'), value })
    const got = await call(zipped, 'Range', { key: own('gzip') })
    assert.ok(value.equals(got.kvs[0].value))
    // What is small on its way and too large when it came is refused as what came so.
    await fails(call(zipped, 'Put', { key: own('gzip'), value: Buffer.alloc(64 << 20) }), grpc.status.RESOURCE_EXHAUSTED)
    zipped.close()
  },

  async deflate () {
    const zipped = connect('KV', { 'grpc.default_compression_algorithm': grpc.compressionAlgorithms.deflate })
    await fails(call(zipped, 'Range', { key: own('a'), range_end: Buffer.alloc(1000) }), grpc.status.UNIMPLEMENTED)
    zipped.close()
  },

  async 'keep a lease alive' () {
    const lease = await call(leases, 'LeaseGrant', { TTL: '60' })
    const stream = leases.LeaseKeepAlive()
    const box = inbox(stream)
    for (let i = 0; i < 100; i++) {
      stream.write({ ID: lease.ID })
      assert.equal((await box.next()).TTL, '60')
    }
    stream.end()
    assert.equal((await box.ended()).code, grpc.status.OK)
    await call(leases, 'LeaseRevoke', { ID: lease.ID })
  },

  async 'very many at once' () {
    const keys = Array.from({ length: 2000 }, (_, i) => `many/${i}`)
    await Promise.all(keys.map(k => put(k, k)))
    const got = await Promise.all(keys.map(k => get(k)))
    got.forEach((g, i) => assert.equal(g.kvs[0].value.toString(), keys[i]))
  },

  // The member that this runs against allows a ping each half second, of a client that has a call.
  async 'pings of a quiet stream' () {
    const quiet = connect('Watch', {
      'grpc.keepalive_time_ms': 700, 'grpc.keepalive_timeout_ms': 2000, 'grpc.use_local_subchannel_pool': 1
    })
    const stream = quiet.Watch()
    const box = inbox(stream)
    stream.write({ create_request: { key: own('quiet') } })
    assert.equal((await box.next()).created, true)
    const channel = quiet.getChannel()
    assert.equal(channel.getConnectivityState(false), grpc.connectivityState.READY)
    const changed = await new Promise(resolve => channel.watchConnectivityState(grpc.connectivityState.READY, Date.now() + 5000, err => resolve(!err)))
    assert.equal(changed, false, 'the connection was ended')
    await put('quiet', 'v')
    assert.equal((await box.next()).events.length, 1)
    stream.cancel()
    quiet.close()
  }
}

const within = (ms, work) => {
  let timer
  const late = new Promise((resolve, reject) => { timer = setTimeout(() => reject(new Error(`not done within ${ms} ms`)), ms) })
  return Promise.race([work, late]).finally(() => clearTimeout(timer))
}

let failed = false
for (const [name, run] of Object.entries(cases)) {
  try {
    await within(30_000, run())
    console.log(`ok ${name}`)
  } catch (err) {
    failed = true
    console.log(`not ok ${name}: ${err.stack ?? err}`)
  }
}
process.exit(failed ? 1 : 0) // with whatever a failed case left open
