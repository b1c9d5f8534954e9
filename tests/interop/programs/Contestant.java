import java.io.BufferedReader;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.leader.LeaderLatch;
import org.apache.curator.framework.recipes.leader.LeaderLatchListener;
import org.apache.curator.framework.recipes.leader.LeaderSelector;
import org.apache.curator.framework.recipes.leader.LeaderSelectorListenerAdapter;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/**
 * A contestant that uses a recipe of Apache Curator, on ZooKeeper: HOSTS PREFIX latch|mutex|selector SESSION CONTESTANT ACTS.
 *
 * It obeys the lines on its standard input, and answers with lines, see tests/interop/contestants.py.
 */
public final class Contestant {
    private static final long PAUSE = 5;

    private final CuratorFramework client;
    private final String prefix;
    private final String kind;
    private final String contestant;
    private final OutputStream acts;
    private final Map<String, Candidate> candidates = new ConcurrentHashMap<>();

    private Contestant(CuratorFramework client, String[] arguments) throws IOException {
        this.client = client;
        this.prefix = arguments[1];
        this.kind = arguments[2];
        this.contestant = arguments[4];
        this.acts = new FileOutputStream(arguments[5], true); // opened for appending; a line is one write
    }

    public static void main(String[] arguments) throws Exception {
        int session = (int) (Double.parseDouble(arguments[3]) * 1000);
        try (CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], session, 5000, new RetryOneTime(100))) {
            client.start();
            client.blockUntilConnected();
            new Contestant(client, arguments).obey();
        }
        System.exit(0); // threads that still wait don't matter
    }

    private void obey() throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        say("ready");
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = line.split(" ", 2);
            String name = words[1];
            switch (words[0]) {
                case "stand":
                    Candidate candidate = candidate(name);
                    candidates.put(name, candidate);
                    candidate.stand();
                    break;
                case "release":
                    candidates.get(name).release();
                    break;
                case "leader":
                    say("leader " + name + " " + leader(name));
                    break;
                default:
                    throw new IllegalArgumentException(line);
            }
        }
    }

    private Candidate candidate(String name) {
        switch (kind) {
            case "latch":
                return new Latch(name);
            case "mutex":
                return new Mutex(name);
            case "selector":
                return new Selector(name);
            default:
                throw new IllegalArgumentException(kind);
        }
    }

    private String leader(String name) throws Exception {
        String path = prefix + "/" + name;
        if (kind.equals("latch")) {
            return new LeaderLatch(client, path).getLeader().getId(); // not started: it only looks
        }
        LeaderSelector selector = new LeaderSelector(client, path, new LeaderSelectorListenerAdapter() {
            @Override
            public void takeLeadership(CuratorFramework ignored) {
            }
        });
        return selector.getLeader().getId();
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    private void note(String what, String name) {
        try {
            acts.write((what + " " + name + " " + contestant + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) {
            throw new IllegalStateException(error);
        }
    }

    /** One candidacy: it stands, leads and acts until it is released. */
    private abstract class Candidate {
        final String name;
        final String path;
        final CountDownLatch released = new CountDownLatch(1);

        Candidate(String name) {
            this.name = name;
            this.path = prefix + "/" + name;
        }

        abstract void stand() throws Exception;

        void release() {
            released.countDown();
        }

        /** Act as the leader until released or interrupted. */
        void lead() throws InterruptedException {
            note("begin", name);
            try {
                say("leading " + name);
                do {
                    note("act", name);
                } while (!released.await(PAUSE, TimeUnit.MILLISECONDS));
            } finally {
                note("end", name);
            }
        }

        void run(Task task) {
            Thread thread = new Thread(() -> {
                try {
                    task.run();
                    say("released " + name);
                } catch (Exception error) {
                    error.printStackTrace();
                }
            });
            thread.setDaemon(true);
            thread.start();
        }
    }

    private interface Task {
        void run() throws Exception;
    }

    private final class Latch extends Candidate {
        Latch(String name) {
            super(name);
        }

        @Override
        void stand() throws Exception {
            LeaderLatch latch = new LeaderLatch(client, path, contestant);
            latch.addListener(new LeaderLatchListener() {
                private Thread work;

                @Override
                public void isLeader() {
                    work = new Thread(() -> {
                        try {
                            lead();
                            latch.close();
                            say("released " + name);
                        } catch (InterruptedException | IOException lost) {
                            say("lost " + name);
                        }
                    });
                    work.setDaemon(true);
                    work.start();
                }

                @Override
                public void notLeader() {
                    if (released.getCount() > 0) {
                        work.interrupt();
                    }
                }
            });
            latch.start();
        }
    }

    private final class Mutex extends Candidate {
        Mutex(String name) {
            super(name);
        }

        @Override
        void stand() {
            run(() -> {
                InterProcessMutex mutex = new InterProcessMutex(client, path);
                mutex.acquire();
                try {
                    lead();
                } finally {
                    mutex.release();
                }
            });
        }
    }

    private final class Selector extends Candidate {
        Selector(String name) {
            super(name);
        }

        @Override
        void stand() {
            LeaderSelector selector = new LeaderSelector(client, path, new LeaderSelectorListenerAdapter() {
                @Override
                public void takeLeadership(CuratorFramework ignored) throws InterruptedException {
                    lead();
                }
            });
            selector.setId(contestant);
            selector.start();
            run(() -> {
                released.await();
                while (selector.hasLeadership()) { // until takeLeadership has returned, and the lock is released
                    Thread.sleep(1);
                }
                selector.close();
            });
        }
    }
}
